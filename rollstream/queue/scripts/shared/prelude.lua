-- prelude: what every script begins with. KEYS[1] is the run's prefix `rs:{run}:`.
local K = KEYS[1]
local call = redis.call
local M = K .. 'm'

-- Lua prints large numbers as 1e+15; Redis wants all their digits.
local function int(number) return string.format('%.0f', number) end

-- The named fields of a hash, in one command; an absent one is false.
local function read(key, ...)
  local names, values, row = {...}, call('HMGET', key, ...), {}
  for j, name in ipairs(names) do row[name] = values[j] end
  return row
end

local function group_key(gid) return K .. 'g:' .. gid end
local function body_key(gid) return K .. 'b:' .. gid end
local function is_evaluation(gid) return string.sub(gid, 1, 2) == 'e:' end

-- Redis refuses a script when memory is full at its first write, and only there. This write is
-- permitted then, and changes nothing.
local function permit_full_memory() call('ZREM', K .. 'd', '') end
