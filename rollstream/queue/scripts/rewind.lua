-- rewind: the checkpoint is the authority on what was trained; the frontier becomes the checkpoint's.
-- argv: consumer rewind_id frontier bitmap
-- keys: m HASH, cur STRING, g:<gid> HASH, b:<gid> HASH, ready STREAM, eval STREAM, full STREAM, gs SET, ge SET, q ZSET, s ZSET, d ZSET, l ZSET, age ZSET, dl ZSET, c HASH, past STREAM, room LIST, ctl STREAM, vanished HASH
-- group: dropped
-- member: group_ended
-- answer: frontier epoch seen beyond more | taken
-- repeat: drops the next page; frontier and epoch with 0 0 0 where nothing is left to drop
-- uses: rewinding control
local consumer, rewind_id, frontier, bitmap = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
permit_full_memory()
local run = read(M, 'consumer', 'rewind_id', 'frontier', 'epoch', 'rewinding')
if run.consumer ~= consumer then return {'taken'} end
if run.rewind_id == rewind_id then
  if not run.rewinding then return {run.frontier, run.epoch, 0, 0, 0} end
  local seen, beyond, more = drop_rewound(run.rewinding)
  return {run.frontier, run.epoch, seen, beyond, more and 1 or 0}
end
check_types('gs ctl cur past room' .. PLACES)
local base = math.floor(frontier / 8) * 8
call('DEL', K .. 'cur')
if bitmap ~= '' then call('SET', K .. 'cur', bitmap) end
for offset = 0, frontier - base - 1 do call('SETBIT', K .. 'cur', offset, 1) end
if bitmap ~= '' or frontier > base then
  frontier = base + call('BITPOS', K .. 'cur', 0, 0)
end
call('HSET', M, 'frontier', int(frontier), 'base', int(base), 'rewind_id', rewind_id, 'done', 0)
local epoch = call('HINCRBY', M, 'epoch', 1)
local seen, beyond, more = drop_rewound('0')
announce('epoch', epoch)
ring('room')
return {int(frontier), epoch, seen, beyond, more and 1 or 0}
