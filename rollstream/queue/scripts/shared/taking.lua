-- taking: members of a group are taken out of the sets that they wait in or are leased in.
local CHUNK = 512       -- Lua unpacks at most some thousands of values

-- Takes members `first` to `last` (CHUNK at most) from their sets; returns those without an end.
local function take_out_some(gid, g, first, last)
  local names = {}
  for i = first, last do names[#names + 1] = 'f' .. i; names[#names + 1] = 't' .. i end
  local values, members, waiting, leased = call('HMGET', g, unpack(names)), {}, {}, {}
  for i = first, last do
    local final, token = values[2 * (i - first) + 1], values[2 * (i - first) + 2]
    if not final then
      members[#members + 1] = i
      waiting[#waiting + 1] = gid .. ':' .. i
      if token then leased[#leased + 1] = gid .. ':' .. i .. ':' .. token end
    end
  end
  -- Each of them is in exactly one set: what was found need not be looked for elsewhere.
  local left = #waiting
  if #leased > 0 then left = left - call('ZREM', K .. 'l', unpack(leased)) end
  for _, set in ipairs({'q', 's', 'd'}) do
    if left > 0 then left = left - call('ZREM', K .. set, unpack(waiting)) end
  end
  return members
end
