-- enqueue: one prompt group and its n members wait for leases.
-- argv: gid n priority timeout_ms prompt [env]
-- keys: m HASH, cur STRING, g:<gid> HASH, gs SET, ge SET, q ZSET, c HASH, bell LIST, vanished HASH
-- creates: open queued
-- group: -
-- member: -
-- answer: new | dup | done | full | wait frontier | the state of a run that takes none | lost
-- repeat: dup (done, once the group ended), nothing is written
-- memory: refused on purpose (the only script that is); answers full
-- uses: clock queueing frontier damage types
local PRIORITY_STEP = 1099511627776 -- 2^40 groups of one priority before the next begins
local gid, n, priority, timeout_ms, prompt, env = unpack(ARGV)
local run = read(M, 'state', 'cap', 'frontier', 'base', 'W', 'draining')
if run.state ~= 'running' and run.state ~= 'paused' then return {run.state or 'lost'} end
local id = tonumber(gid)
if id then
  local frontier = tonumber(run.frontier)
  if id >= frontier + tonumber(run.W) then return {'wait', run.frontier} end
  if is_terminal(id, frontier, tonumber(run.base)) then return {'done'} end
end
local g = group_key(gid)
if call('EXISTS', g) == 1 then return {'dup'} end
if id and run.draining == '1' then return {'full', 'draining'} end
if id and call('SCARD', K .. 'gs') >= tonumber(run.cap) then return {'full'} end
local added = redis.pcall('SADD', K .. (id and 'gs' or 'ge'), gid)
if type(added) == 'table' then
  if string.find(tostring(added.err), 'OOM', 1, true) then return {'full', 'memory'} end
  return added
end
-- A live group without a hash: the walk of the next sweeps ends it, then its id comes again.
if added == 0 then
  walk_to(gid)
  return {'dup'}
end
local seq = call('HINCRBY', M, 'seq', 1)
local score = int(tonumber(priority) * PRIORITY_STEP + seq)
local counter, is_counted = id and 'enqueued' or 'e.enqueued', false
local ok, problem = pcall(function()
  call('HINCRBY', K .. 'c', counter, 1)
  is_counted = true
  queue_members(gid, n, score)
  call('HSET', g, 'n', n, 'left', n, 'state', 'open', 'score', score, 'timeout_ms', timeout_ms,
    'prompt', prompt, 'life', 0, 'since', int(now_ms()), 'env', env or '')
end)
if ok then return {'new'} end
-- A key of the run is another program's: nothing of the group may stay.
call('SREM', K .. (id and 'gs' or 'ge'), gid)
if is_counted then call('HINCRBY', K .. 'c', counter, -1) end
for i = 0, n - 1 do redis.pcall('ZREM', K .. 'q', gid .. ':' .. i) end
return failure(problem)
