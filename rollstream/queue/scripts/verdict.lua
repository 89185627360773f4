-- verdict: the aggregator's judgement of a full group.
-- argv: gid full_id keep|drop reason detail (member header)*
-- keys: m HASH, g:<gid> HASH, b:<gid> HASH, full STREAM, ready STREAM, eval STREAM, gs SET, ge SET, q ZSET, s ZSET, d ZSET, l ZSET, age ZSET, dl ZSET, cur STRING, c HASH, past STREAM, room LIST, vanished HASH
-- group: kept dropped
-- member: -
-- answer: ready | dropped | noop
-- repeat: noop; so is a late verdict of an earlier life, which only removes its own entry
-- uses: groups entries types
-- lazily: ending
local gid, message, judgement, reason, detail = unpack(ARGV, 1, 5)
permit_full_memory()
local g = group_key(gid)
local row = read_group(g, 'state', 'full_id', 'n', 'bytes')
if row.state ~= 'full' or row.full_id ~= message then
  remove_entry('full', 'aggregators', message)
  return 'noop'
end
if judgement == 'drop' then
  end_group(gid, 'dropped', reason, detail)
  return 'dropped'
end
local ready_id = call('XADD', K .. 'ready', '*', 'g', gid, 'n', row.n, 'b', row.bytes or 0,
  'p', call('HSTRLEN', g, 'prompt'))
local ok, problem = pcall(remove_entry, 'full', 'aggregators', message)
if not ok then
  call('XDEL', K .. 'ready', ready_id)
  return failure(problem)
end
call('HSET', g, 'state', 'ready', 'ready_id', ready_id)
for j = 6, #ARGV, 2 do call('HSET', g, 'h' .. ARGV[j], ARGV[j + 1]) end
return 'ready'
