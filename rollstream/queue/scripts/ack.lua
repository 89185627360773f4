-- ack: the trainer trained on groups. That is a fact, so it ends a group in whatever live state.
-- argv: consumer gid*
-- keys: m HASH, g:<gid> HASH, b:<gid> HASH, ready STREAM, eval STREAM, full STREAM, gs SET, ge SET, q ZSET, s ZSET, d ZSET, l ZSET, age ZSET, dl ZSET, cur STRING, c HASH, past STREAM, room LIST, vanished HASH
-- group: acked
-- member: group_ended
-- answer: taken | per group: acked | done | lost (Redis forgot it; its id is terminal now)
-- repeat: done, nothing is written
-- uses: ending
permit_full_memory()
if call('HGET', M, 'consumer') ~= ARGV[1] then return {'taken'} end
local answer, rows = {}, {}

local function acknowledge(gid, row)
  if end_group(gid, 'acked', nil, nil, false, false, row) then return 'acked' end
  local id, run = tonumber(gid), read(M, 'frontier', 'base')
  if not id or is_terminal(id, tonumber(run.frontier), tonumber(run.base)) then return 'done' end
  call('HINCRBY', K .. 'c', 'reacked', 1)
  mark_terminal(gid)
  return 'lost'
end

for j = 2, #ARGV do rows[j] = before_end(ARGV[j], 'acked') end
for j = 2, #ARGV do answer[#answer + 1] = acknowledge(ARGV[j], rows[j]) end
return answer
