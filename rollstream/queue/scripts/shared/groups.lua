-- groups: the hash of a group, which may be gone (`damage`), or replaced by another program's key.
local MAX_N = 8192 -- twice what a producer enqueues

-- Whether a group can have so many members. Any other size is damage, and a loop over it would keep
-- the server from everybody.
local function is_size(n)
  n = tonumber(n)
  return n ~= nil and n >= 1 and n <= MAX_N
end

-- Values of its fields; none where it is not there.
local function group_values(g, ...)
  local values = redis.pcall('HMGET', g, ...)
  return values.err and {} or values
end

-- The same by name. A hash with an impossible size counts as gone.
local function read_group(g, ...)
  local names, values, row = {...}, redis.pcall('HMGET', g, ...), {}
  if not values.err then
    for j, name in ipairs(names) do
      if name == 'n' and not is_size(values[j]) then return {} end
      row[name] = values[j]
    end
  end
  return row
end
