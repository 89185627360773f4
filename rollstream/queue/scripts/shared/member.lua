-- member: how a member waits again or fails for good, and how a group becomes full.
-- uses: wake ids damage
local SUSPECT_CRASHES = 2

local function group_full(gid, g)
  local row = call('HMGET', g, 'n', 'bytes')
  -- The sizes are for readers, who bound what one round trip asks for.
  local message = call('XADD', K .. 'full', '*', 'g', gid, 'n', row[1], 'b', row[2] or 0,
    'p', call('HSTRLEN', g, 'prompt'))
  call('HSET', g, 'state', 'full', 'full_id', message)
  call('ZREM', K .. 'dl', gid) -- only an open group has a deadline
end

-- One member failed for good; the caller took it from its set.
local function fail_member(gid, g, i, reason, text)
  local left = call('HINCRBY', g, 'left', -1)
  call('HSET', g, 'f' .. i, 'x:' .. reason, 'e' .. i, reason .. ' ' .. text)
  call('HSETNX', g, 'why', reason)
  call('HINCRBY', g, 'failed', 1)
  if call('HDEL', g, 'k' .. i) == 1 then call('HDEL', body_key(gid), 'p' .. i) end
  call('HINCRBY', K .. 'c', 'member_failed:' .. reason, 1)
  if left == 0 then group_full(gid, g) end
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
    call('ZADD', K .. (suspect and 's' or 'q'), row[1], id)
    ring('bell')
  end
end

-- Delayed members that are due by `clock` wait for a lease again; returns how many were moved.
local function promote(clock, limit)
  local due = call('ZRANGEBYSCORE', K .. 'd', '-inf', int(clock), 'LIMIT', 0, limit)
  for _, id in ipairs(due) do
    local gid, i = split_member(id)
    local g = group_key(gid)
    if call('EXISTS', g) == 1 then send_back(gid, g, i) else met_vanished(gid) end
    call('ZREM', K .. 'd', id)
  end
  return #due
end
