-- member: how a member waits again or fails for good, and how a group becomes full.
-- uses: wake ids damage types
local SUSPECT_CRASHES = 2

local function group_full(gid, g)
  local row = call('HMGET', g, 'n', 'bytes')
  -- The sizes are for readers, who bound what one round trip asks for.
  local message = call('XADD', K .. 'full', '*', 'g', gid, 'n', row[1], 'b', row[2] or 0,
    'p', call('HSTRLEN', g, 'prompt'))
  local removed = redis.pcall('ZREM', K .. 'dl', gid) -- only an open group has a deadline
  if type(removed) == 'table' then
    call('XDEL', K .. 'full', message)
    error(removed.err)
  end
  call('HSET', g, 'state', 'full', 'full_id', message)
end

-- Members of a group failed for good; the caller took them from their sets, and checked `FAILING`
-- before.
local FAILING = {'full', 'dl', 'c'}
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

local function too_large_text(size, max_bytes)
  return int(size) .. ' bytes, allowed are ' .. int(max_bytes)
end

-- The member waits again: until `due` on the queue clock, or at once where it is nil.
local function send_back(gid, g, i, due)
  local id = gid .. ':' .. i
  if due then
    call('ZADD', K .. 'd', int(due), id)
  else
    local row = call('HMGET', g, 'score', 'x' .. i)
    local suspect = (tonumber(row[2]) or 0) >= SUSPECT_CRASHES
    ring('bell')
    call('ZADD', K .. (suspect and 's' or 'q'), row[1], id)
  end
end

-- Delayed members that are due by `clock` wait for a lease again; returns how many were moved.
local function promote(clock, limit)
  local due = call('ZRANGEBYSCORE', K .. 'd', '-inf', int(clock), 'LIMIT', 0, limit)
  for _, id in ipairs(due) do
    local gid, i = split_member(id)
    local g = gid and group_key(gid) -- a foreign name is nobody's
    if g and call('EXISTS', g) == 1 then send_back(gid, g, i) else met_vanished(gid) end
    call('ZREM', K .. 'd', id)
  end
  return #due
end
