-- streams: `full` and `ready` with their consumer groups. Each may be missing where the other is
-- there (a key that was deleted by hand); BUSYGROUP is fine.
local function make_streams()
  redis.pcall('XGROUP', 'CREATE', K .. 'full', 'aggregators', '0', 'MKSTREAM')
  redis.pcall('XGROUP', 'CREATE', K .. 'ready', 'trainer', '0', 'MKSTREAM')
end

-- How long an entry idled is measured on TIME: where that went back, nobody would take an entry
-- over before it is there again. JUSTID leaves the number of its deliveries alone.
local function restart_idle_times()
  local start = '0-0'
  repeat
    local page = redis.pcall('XAUTOCLAIM', K .. 'full', 'aggregators', 'aggregator', 0, start,
      'COUNT', 100, 'JUSTID')
    start = page[1] or '0-0'
  until start == '0-0'
end
