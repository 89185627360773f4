-- open: creates the run, or finds it; the producer's first call.
-- argv: schema fingerprint (budget value)*
-- keys: m HASH, full STREAM, ready STREAM, d ZSET, ctl STREAM
-- group: -
-- member: -
-- answer: created state | same state | mismatch schema fingerprint
-- repeat: same, with the budgets set once more to the same values
-- uses: clock control streams types
local schema, fingerprint = ARGV[1], ARGV[2]
permit_full_memory()
check_types('ctl full ready')
local run = read(M, 'schema', 'fingerprint', 'state')
if run.state and (run.schema ~= schema or run.fingerprint ~= fingerprint) then
  return {'mismatch', run.schema or '', run.fingerprint or ''}
end
if not run.state then
  call('HSET', M, 'schema', schema, 'fingerprint', fingerprint, 'state', 'running',
    'version', 0, 'epoch', 1, 'seq', 0, 'control_seq', 0, 'connects', 0, 'consumer', '',
    'frontier', 0, 'base', 0, 'rewind_id', '', 'delivered', 0, 'done', 0, 'error', '',
    'clock', 1, 'clock_tick', int(now_ms()), 'grace_until', 0, 'paused_total', 0, 'paused_at', 0,
    'opened', int(now_ms()))
end
local changed = false
for j = 3, #ARGV, 2 do changed = changed or call('HGET', M, ARGV[j]) ~= ARGV[j + 1] end
if changed then call('HSET', M, unpack(ARGV, 3)) end
if changed and run.state then announce('set', 'open') end -- workers beat by the lease that they read
make_streams()
return {run.state and 'same' or 'created', run.state or 'running'}
