-- withdraw: a group is not wanted any more (a user's wish), or `skip`: a row never becomes a group.
-- argv: gid reason(withdrawn|skip)
-- keys: m HASH, g:<gid> HASH, b:<gid> HASH, ready STREAM, eval STREAM, full STREAM, gs SET, ge SET, q ZSET, s ZSET, d ZSET, l ZSET, age ZSET, dl ZSET, cur STRING, c HASH, past STREAM, room LIST, vanished HASH
-- group: dropped
-- member: group_ended
-- answer: dropped | gone | held (the trainer has it); for skip also skipped | done | wait | lost
-- repeat: gone; for skip: done
-- uses: ending
local gid, reason = ARGV[1], ARGV[2]
permit_full_memory()
if group_values(group_key(gid), 'state')[1] == 'delivered' then return 'held' end
if end_group(gid, 'dropped', 'withdrawn', reason == 'skip' and 'bad row' or '') then
  return 'dropped'
end
if reason ~= 'skip' then return 'gone' end
local run, id = read(M, 'frontier', 'base', 'W'), tonumber(gid)
if not run.frontier then return 'lost' end
local frontier = tonumber(run.frontier)
if id >= frontier + tonumber(run.W) then return 'wait' end
if is_terminal(id, frontier, tonumber(run.base)) then return 'done' end
call('HINCRBY', K .. 'c', 'skipped', 1)
mark_terminal(gid)
return 'skipped'
