-- complete: results of trajectories that ended; the last of a group makes it full.
-- argv: (gid member token header body text)*
-- keys: l ZSET, g:<gid> HASH, b:<gid> HASH, full STREAM, dl ZSET, m HASH, c HASH, vanished HASH
-- group: last_member_ended
-- member: completed failed_finally
-- answer: per member: members left | dup | fenced | too_large
-- repeat: dup, or fenced once the group is gone; no result is written (the counter `fenced` counts)
-- uses: member
local answer, completed, fenced = {}, 0, 0
local max_bytes = nil

local function land(gid, i, token, header, body, text)
  local g = group_key(gid)
  if call('ZREM', K .. 'l', gid .. ':' .. i .. ':' .. token) == 0 then
    return group_values(g, 'f' .. i)[1] == token and 'dup' or 'fenced'
  end
  local row = group_values(g, 'state', 'left', 'k' .. i, 'bytes')
  if not row[1] then met_vanished(gid) end
  if row[1] ~= 'open' then return 'fenced' end
  local size = #header + #body + #text
  max_bytes = max_bytes or tonumber(call('HGET', M, 'max_body') or math.huge)
  if size > max_bytes then
    fail_member(gid, g, i, 'too_large', too_large_text(size, max_bytes))
    return 'too_large'
  end
  local left = tonumber(row[2]) - 1
  call('HSET', g, 'left', left, 'f' .. i, token, 'h' .. i, header,
    'bytes', (row[4] or 0) + #body + #text)
  if text == '' then
    call('HSET', body_key(gid), i, body)
  else
    call('HSET', body_key(gid), i, body, 'x' .. i, text)
  end
  if row[3] then
    call('HDEL', g, 'k' .. i)
    call('HDEL', body_key(gid), 'p' .. i)
  end
  if left == 0 then group_full(gid, g) end
  return left
end

for j = 1, #ARGV, 6 do
  local outcome = land(unpack(ARGV, j, j + 5))
  if type(outcome) == 'number' then completed = completed + 1 end
  if outcome == 'fenced' then fenced = fenced + 1 end
  answer[#answer + 1] = outcome
end
if completed > 0 then call('HINCRBY', K .. 'c', 'completed', completed) end
if fenced > 0 then call('HINCRBY', K .. 'c', 'fenced', fenced) end
return answer
