-- filling: how a group becomes full, and what is said of a result that is too large.

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

local function too_large_text(size, max_bytes)
  return int(size) .. ' bytes, allowed are ' .. int(max_bytes)
end
