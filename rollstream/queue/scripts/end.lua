-- end: the source is exhausted, or the run is aborted (its groups dropped) or failed (they stay).
-- argv: done epoch | abort reason | fail reason
-- keys: m HASH, d ZSET, ctl STREAM, bell LIST
-- group: -
-- member: -
-- answer: the run's state | epoch (done of an older epoch: scan again) | lost
-- repeat: the same answer, nothing is written
-- uses: wake control types
local op, argument = ARGV[1], ARGV[2]
permit_full_memory()
local run = read(M, 'state', 'epoch', 'done')
if not run.state then return 'lost' end
check_types('ctl bell')
if op == 'done' then
  if run.epoch ~= argument then return 'epoch' end
  if run.done ~= '1' then
    call('HSET', M, 'done', 1)
    announce('done', argument)
  end
  return run.state
end
local live = run.state == 'running' or run.state == 'paused'
local next_state = nil
if op == 'abort' and (live or run.state == 'failed') then next_state = 'aborting' end
if op == 'fail' and live then next_state = 'failed' end
if not next_state then return run.state end
call('HSET', M, 'state', next_state)
if argument ~= '' then call('HSET', M, 'error', argument) end
announce(op, argument)
ring('bell')
return next_state
