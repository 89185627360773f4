-- requeue: a live group begins anew under the same id: budgets, deadline, version and results are new.
-- argv: gid life reason
-- keys: m HASH, g:<gid> HASH, b:<gid> HASH, ready STREAM, eval STREAM, full STREAM, gs SET, ge SET, q ZSET, s ZSET, d ZSET, l ZSET, age ZSET, dl ZSET, c HASH, bell LIST, vanished HASH
-- group: requeued
-- member: requeued
-- answer: requeued | gone (or too damaged to begin anew) | other (its life is another one) | exhausted (max_requeues) | lost
-- repeat: other, nothing is written
-- uses: renewing
local gid, life, reason = unpack(ARGV)
permit_full_memory()
local run = read(M, 'state', 'max_requeues')
if not run.state then return 'lost' end
local g = group_key(gid)
local row = read_group(g, 'state', 'n', 'full_id', 'ready_id', 'score', 'timeout_ms', 'prompt', 'life',
  'env')
if not (row.state and row.score and row.timeout_ms and row.prompt) then return 'gone' end
if row.life ~= life then return 'other' end
if tonumber(life) >= tonumber(run.max_requeues or 1) then return 'exhausted' end
renew(gid, g, row, reason)
return 'requeued'
