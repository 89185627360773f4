-- waiting: how a member waits for a lease again.
-- uses: clock wake ids damage types
local SUSPECT_CRASHES = 2

local function queue_again(gid, g, i)
  local row = call('HMGET', g, 'score', 'x' .. i)
  local suspect = (tonumber(row[2]) or 0) >= SUSPECT_CRASHES
  ring('bell')
  call('ZADD', K .. (suspect and 's' or 'q'), row[1], gid .. ':' .. i)
end

-- The member waits again: until `due` on the queue clock, or at once where it is nil.
local function send_back(gid, g, i, due)
  if due then
    call('ZADD', K .. 'd', int(due), gid .. ':' .. i)
  else
    queue_again(gid, g, i)
  end
  -- Its wait begins here, however long ago its group came: `measure` tells how long it is.
  call('HSET', g, 'w' .. i, int(now_ms()))
end

-- Delayed members that are due by `clock` wait for a lease again; returns how many were moved.
local function promote(clock, limit)
  local due = call('ZRANGEBYSCORE', K .. 'd', '-inf', int(clock), 'LIMIT', 0, limit)
  for _, id in ipairs(due) do
    local gid, i = split_member(id)
    local g = gid and group_key(gid) -- a foreign name is nobody's
    if g and call('EXISTS', g) == 1 then queue_again(gid, g, i) else met_vanished(gid) end
    call('ZREM', K .. 'd', id)
  end
  return #due
end
