-- beat: a worker lives, and all its leases with it.
-- argv: worker lease_id*
-- keys: m HASH, w ZSET, l ZSET, d ZSET
-- group: -
-- member: -
-- answer: state version control_seq lost_lease_id* | lost
-- repeat: the same answer; extends only what is still leased and creates nothing
-- uses: clock
local CHUNK = 1000
permit_full_memory()
local run = read(M, 'state', 'lease_ms', 'clock', 'clock_tick', 'paused_total', 'paused_at',
  'version', 'control_seq')
if not run.state then return {'lost'} end
local clock = clock_of(run)
local expires = int(clock + tonumber(run.lease_ms))
local answer = {run.state, run.version, run.control_seq}
call('ZADD', K .. 'w', int(clock), ARGV[1])
for first = 2, #ARGV, CHUNK do
  local last = math.min(first + CHUNK - 1, #ARGV)
  local scores, extended = call('ZMSCORE', K .. 'l', unpack(ARGV, first, last)), {}
  for j = first, last do
    if scores[j - first + 1] then
      extended[#extended + 1] = expires
      extended[#extended + 1] = ARGV[j]
    else
      answer[#answer + 1] = ARGV[j]
    end
  end
  if #extended > 0 then call('ZADD', K .. 'l', 'XX', unpack(extended)) end
end
return answer
