-- complete: results of trajectories that ended; the last of a group makes it full.
-- argv: (gid member token header body text)*
-- keys: l ZSET, g:<gid> HASH, b:<gid> HASH, full STREAM, eval STREAM, dl ZSET, m HASH, c HASH, vanished HASH
-- group: last_member_ended kept
-- member: completed failed_finally
-- answer: per member: members left | dup | fenced | too_large
-- repeat: dup, or fenced once the group is gone; no result is written (the counter `fenced` counts)
-- uses: groups damage types filling
-- lazily: member
local answer, completed, fenced = {}, 0, 0
local max_bytes = tonumber(call('HGET', M, 'max_body') or math.huge)

local function land(gid, i, token, header, body, text)
  local g, lease_id = group_key(gid), gid .. ':' .. i .. ':' .. token
  local size = #header + #body + #text
  if size > max_bytes then check_types(FAILING) end
  if call('ZREM', K .. 'l', lease_id) == 0 then
    return group_values(g, 'f' .. i)[1] == token and 'dup' or 'fenced'
  end
  local row = redis.pcall('HMGET', g, 'state', 'left', 'k' .. i, 'bytes', 'f' .. i)
  if not row[1] then met_vanished(gid) end
  if row[1] ~= 'open' or row[5] then return 'fenced' end -- a member ends once, whoever leased it
  if size > max_bytes then
    fail_member(gid, g, i, 'too_large', too_large_text(size, max_bytes))
    return 'too_large'
  end
  local stored = nil
  if text == '' then
    stored = redis.pcall('HSET', body_key(gid), i, body)
  else
    stored = redis.pcall('HSET', body_key(gid), i, body, 'x' .. i, text)
  end
  if type(stored) == 'table' then -- another program's key: the walk ends the group
    begin_walk()
    return 'fenced'
  end
  local left = tonumber(row[2]) - 1
  call('HSET', g, 'left', left, 'f' .. i, token, 'h' .. i, header,
    'bytes', (row[4] or 0) + #body + #text)
  if left == 0 then
    local ok, problem = pcall(group_full, gid, g)
    if not ok then
      -- The member keeps its lease (for one lease from now), as if nothing had been reported.
      local run = read(M, 'lease_ms', 'clock')
      call('HDEL', g, 'f' .. i, 'h' .. i)
      call('HSET', g, 'left', row[2], 'bytes', row[4] or 0)
      if not row[4] then call('HDEL', g, 'bytes') end
      call('HDEL', body_key(gid), i, 'x' .. i)
      call('ZADD', K .. 'l', int(tonumber(run.clock) + tonumber(run.lease_ms)), lease_id)
      error(problem)
    end
  end
  if row[3] then
    call('HDEL', g, 'k' .. i)
    call('HDEL', body_key(gid), 'p' .. i)
  end
  return left
end

local function land_all()
  for j = 1, #ARGV, 6 do
    local outcome = land(unpack(ARGV, j, j + 5))
    if type(outcome) == 'number' then completed = completed + 1 end
    if outcome == 'fenced' then fenced = fenced + 1 end
    answer[#answer + 1] = outcome
  end
end

local ok, problem = pcall(land_all)
-- What landed has landed, whether it can be counted or not.
if completed > 0 then redis.pcall('HINCRBY', K .. 'c', 'completed', completed) end
if fenced > 0 then redis.pcall('HINCRBY', K .. 'c', 'fenced', fenced) end
return ok and answer or failure(problem)
