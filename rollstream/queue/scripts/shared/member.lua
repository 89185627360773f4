-- member: how a member fails for good.
-- uses: filling groups damage types
-- gives: fail_member

-- Members of a group failed for good; the caller took them from their sets, and checked `FAILING`
-- before.
local function fail_members(gid, g, members, reason, text)
  if #members == 0 then return end
  local ends, flags, parked = {}, {}, {}
  for _, i in ipairs(members) do
    ends[#ends + 1] = 'f' .. i
    ends[#ends + 1] = 'x:' .. reason
    ends[#ends + 1] = 'e' .. i
    ends[#ends + 1] = reason .. ' ' .. text
    flags[#flags + 1] = 'k' .. i
  end
  call('HSET', g, unpack(ends))
  call('HSETNX', g, 'why', reason)
  call('HINCRBY', g, 'failed', #members)
  if call('HDEL', g, unpack(flags)) > 0 then
    for _, i in ipairs(members) do parked[#parked + 1] = 'p' .. i end
    call('HDEL', body_key(gid), unpack(parked))
  end
  call('HINCRBY', K .. 'c', 'member_failed:' .. reason, #members)
  if call('HINCRBY', g, 'left', -#members) == 0 then group_full(gid, g) end
end

local function fail_member(gid, g, i, reason, text)
  if call('HEXISTS', g, 'f' .. i) == 0 then fail_members(gid, g, {i}, reason, text) end
end
