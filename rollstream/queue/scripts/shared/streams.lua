-- streams: `full` and `ready` with their consumer groups. Each may be missing where the other is
-- there (a key that was deleted by hand); BUSYGROUP is fine.
local function make_streams()
  redis.pcall('XGROUP', 'CREATE', K .. 'full', 'aggregators', '0', 'MKSTREAM')
  redis.pcall('XGROUP', 'CREATE', K .. 'ready', 'trainer', '0', 'MKSTREAM')
end
