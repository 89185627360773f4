-- verdict: the aggregator's judgement of a full group; too many drops in a row fail the run.
-- argv: gid full_id keep|drop reason detail (member header)*
-- keys: m HASH, g:<gid> HASH, b:<gid> HASH, full STREAM, ready STREAM, eval STREAM, gs SET, ge SET, q ZSET, s ZSET, d ZSET, l ZSET, age ZSET, dl ZSET, cur STRING, c HASH, past STREAM, room LIST, bell LIST, ctl STREAM, vanished HASH
-- group: kept dropped
-- member: -
-- answer: ready | dropped | noop
-- repeat: noop; so is a late verdict of an earlier life, which only removes its own entry
-- uses: groups entries types
-- lazily: ending streak
local gid, message, judgement, reason, detail = unpack(ARGV, 1, 5)
permit_full_memory()
local g = group_key(gid)
local row = read_group(g, 'state', 'full_id', 'n', 'bytes')
if row.state ~= 'full' or row.full_id ~= message then
  remove_entry('full', 'aggregators', message)
  return 'noop'
end

local function write_headers()
  for j = 6, #ARGV, 2 do call('HSET', g, 'h' .. ARGV[j], ARGV[j + 1]) end
end

if judgement == 'drop' then
  check_types('full age past c cur room bell ctl') -- what ends the group, and maybe the run
  write_headers() -- the record of the drop shows them
  end_group(gid, 'dropped', reason, detail)
  count_drop(gid, reason, detail)
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
write_headers()
call('HDEL', M, 'streak')
return 'ready'
