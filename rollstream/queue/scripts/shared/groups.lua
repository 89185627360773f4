-- groups: the hash of a group, which may be gone (`damage`), or replaced by another program's key.
-- Values of its fields; none where it is not there.
local function group_values(g, ...)
  local values = redis.pcall('HMGET', g, ...)
  return values.err and {} or values
end

-- The same by name.
local function read_group(g, ...)
  local names, values, row = {...}, redis.pcall('HMGET', g, ...), {}
  if not values.err then
    for j, name in ipairs(names) do row[name] = values[j] end
  end
  return row
end
