-- confirm: a worker says up to which control word it obeys, and how many calls it has under way.
-- argv: worker control_seq in_flight engines
-- keys: m HASH, d ZSET, w ZSET, wc HASH
-- group: -
-- member: -
-- answer: state version control_seq | lost
-- repeat: the same answer; the worker's record is what it said last
-- uses: clock types
local worker, control_seq, in_flight, engines = unpack(ARGV)
permit_full_memory()
local run = read(M, 'state', 'lease_ms', 'clock', 'clock_tick', 'paused_total', 'paused_at',
  'version', 'control_seq')
if not run.state then return {'lost'} end
check_types('w wc')
-- Present like one that beats: whoever is forgotten as a worker takes its record along.
call('ZADD', K .. 'w', int(clock_of(run)), worker)
call('HSET', K .. 'wc', worker, control_seq .. ' ' .. in_flight .. ' ' .. engines)
return {run.state, run.version, run.control_seq}
