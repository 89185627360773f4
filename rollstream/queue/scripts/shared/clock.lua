-- clock: the queue clock in ms. Only `sweep` moves it, by at most half a lease a call, so no lease
-- expires because the server was away or its wall clock jumped.
local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- run: state, lease_ms, clock, clock_tick, paused_total, paused_at of `m`.
-- Returns the queue clock, the run clock (the same without paused time), whether TIME jumped, and
-- TIME.
local function clock_of(run)
  local half = math.floor(tonumber(run.lease_ms) / 2)
  local now = now_ms()
  local step = now - tonumber(run.clock_tick)
  local jumped = step < 0 or step > half
  step = math.max(0, math.min(step, half))
  local clock = tonumber(run.clock) + step
  local at = run.state == 'paused' and tonumber(run.paused_at) or clock
  return clock, at - tonumber(run.paused_total), jumped, now
end
