-- pausing: the end of a pause. Deadlines stood still in it: `paused_total` is what the run clock lacks.
-- uses: wake
local function end_pause(run, clock)
  local paused = tonumber(run.paused_total) + clock - tonumber(run.paused_at)
  call('HSET', M, 'state', 'running', 'paused_total', int(paused), 'pause_until', 0)
  ring('bell')
end
