-- present: a process says that it lives, and hears the run's control words.
-- argv: role(worker|producer|aggregator) name here|leaving [about]
-- keys: m HASH, d ZSET, w ZSET, wp ZSET, wa ZSET, wh HASH, wc HASH
-- group: -
-- member: -
-- answer: state version control_seq epoch consumer connects rewind_id | lost | unknown
-- repeat: the same answer
-- uses: clock
local SETS = {worker = 'w', producer = 'wp', aggregator = 'wa'}
local role, name, status, about = unpack(ARGV)
permit_full_memory()
local run = read(M, 'state', 'lease_ms', 'clock', 'clock_tick', 'paused_total', 'paused_at')
if not run.state then return {'lost'} end
if not SETS[role] then return {'unknown'} end
if status == 'leaving' then
  call('ZREM', K .. SETS[role], name)
  call('HDEL', K .. 'wh', name)
  if role == 'worker' then call('HDEL', K .. 'wc', name) end
else
  call('ZADD', K .. SETS[role], int(clock_of(run)), name)
  if about then call('HSET', K .. 'wh', name, about) end
end
return call('HMGET', M, 'state', 'version', 'control_seq', 'epoch', 'consumer', 'connects',
  'rewind_id')
