-- present: a process says that it lives, and hears the run's control words.
-- argv: role(worker|producer|aggregator) name here|leaving [about] [blocked: process from_ms to_ms]
-- keys: m HASH, d ZSET, w ZSET, wp ZSET, wa ZSET, wh HASH, wc HASH, wb HASH, c HASH
-- group: -
-- member: -
-- answer: state version control_seq epoch consumer connects rewind_id | lost | unknown
-- repeat: the same answer
-- uses: clock types
local SETS = {worker = 'w', producer = 'wp', aggregator = 'wa'}
local role, name, status, about, process, from_ms, to_ms = unpack(ARGV)

-- A producer says how long it was blocked since it started: up to `from_ms` it was counted before,
-- as far as it knows, and what the server itself remembers of this process wins over that. So a
-- repeat counts nothing, and what a server forgot in its last second is counted again.
local function count_blocked()
  local known = from_ms
  local last, total = string.match(call('HGET', K .. 'wb', name) or '', '^(%S+) (%d+)$')
  if last == process then known = total end
  local more = tonumber(to_ms) - tonumber(known)
  if more <= 0 then return end
  call('HSET', K .. 'wb', name, process .. ' ' .. to_ms)
  call('HINCRBY', K .. 'c', 'blocked_ms', int(more))
end

permit_full_memory()
local run = read(M, 'state', 'lease_ms', 'clock', 'clock_tick', 'paused_total', 'paused_at')
if not run.state then return {'lost'} end
if not SETS[role] then return {'unknown'} end
if status == 'leaving' then
  call('ZREM', K .. SETS[role], name)
  call('HDEL', K .. 'wh', name)
  call('HDEL', K .. 'wb', name)
  if role == 'worker' then call('HDEL', K .. 'wc', name) end
else
  if to_ms then check_types('wb c') end
  call('ZADD', K .. SETS[role], int(clock_of(run)), name)
  if (about or '') ~= '' then call('HSET', K .. 'wh', name, about) end
  if to_ms then count_blocked() end
end
return call('HMGET', M, 'state', 'version', 'control_seq', 'epoch', 'consumer', 'connects',
  'rewind_id')
