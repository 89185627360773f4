-- park: a trajectory stops half-way and waits with what it has; no budget is charged.
-- argv: gid member token body delay_ms
-- keys: l ZSET, g:<gid> HASH, b:<gid> HASH, m HASH, q ZSET, s ZSET, d ZSET, full STREAM, eval STREAM, dl ZSET, c HASH, bell LIST, vanished HASH
-- group: last_member_ended kept
-- member: parked sent_back_later failed_finally
-- answer: parked | fenced | too_large (the member failed: its result would be larger still)
-- repeat: fenced, no effect
-- uses: clock member waiting
local gid, i, token, body, delay_ms = unpack(ARGV)
local g = group_key(gid)
check_types('q s d bell ' .. FAILING)
local run = read(M, 'state', 'lease_ms', 'clock', 'clock_tick', 'paused_total', 'paused_at',
  'max_body')
local max_bytes = tonumber(run.max_body or math.huge)
if call('ZREM', K .. 'l', gid .. ':' .. i .. ':' .. token) == 0 then return 'fenced' end
local state = group_values(g, 'state')[1]
if not state then met_vanished(gid) end
if state ~= 'open' then return 'fenced' end
if #body > max_bytes then
  fail_member(gid, g, i, 'too_large', too_large_text(#body, max_bytes))
  return 'too_large'
end
local stored = redis.pcall('HSET', body_key(gid), 'p' .. i, body)
if type(stored) == 'table' then -- another program's key: the walk ends the group
  begin_walk()
  return 'fenced'
end
call('HSET', g, 'k' .. i, #body, 'parked', 1)
call('HINCRBY', K .. 'c', 'parked', 1)
local delay = tonumber(delay_ms)
send_back(gid, g, i, delay > 0 and clock_of(run) + delay or nil)
return 'parked'
