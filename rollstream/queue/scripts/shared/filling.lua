-- filling: how a group becomes full, and what is said of a result that is too large. Nobody judges
-- an evaluation: it is ready at once, in a stream of its own.

local function group_full(gid, g)
  local row, stream = call('HMGET', g, 'n', 'bytes'), is_evaluation(gid) and 'eval' or 'full'
  -- The sizes are for readers, who bound what one round trip asks for.
  local message = call('XADD', K .. stream, '*', 'g', gid, 'n', row[1], 'b', row[2] or 0,
    'p', call('HSTRLEN', g, 'prompt'))
  local changed, deadline = nil, 0
  if stream == 'eval' then deadline = tonumber(call('HGET', g, 'deadline') or 0) end
  if deadline > 0 then
    -- One lease behind its deadline it is forgotten, unless somebody acks it.
    local lease_ms = tonumber(call('HGET', M, 'lease_ms'))
    changed = redis.pcall('ZADD', K .. 'dl', int(deadline + lease_ms), gid)
  else
    changed = redis.pcall('ZREM', K .. 'dl', gid) -- of a training group only an open one has one
  end
  if type(changed) == 'table' then
    call('XDEL', K .. stream, message)
    error(changed.err)
  end
  if stream == 'eval' then
    call('HSET', g, 'state', 'ready', 'full_id', message, 'ready_id', message)
  else
    call('HSET', g, 'state', 'full', 'full_id', message)
  end
end

local function too_large_text(size, max_bytes)
  return int(size) .. ' bytes, allowed are ' .. int(max_bytes)
end
