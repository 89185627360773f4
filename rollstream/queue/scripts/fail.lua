-- fail: infrastructure ended a trajectory; the member is tried again, given back, or fails for good.
-- argv: gid member token kind(retry|final|back) reason error delay_ms [forget]
-- keys: l ZSET, g:<gid> HASH, b:<gid> HASH, m HASH, q ZSET, s ZSET, d ZSET, full STREAM, eval STREAM, dl ZSET, c HASH, bell LIST, vanished HASH
-- group: last_member_ended kept
-- member: sent_back sent_back_later failed_finally
-- answer: again | back | failed | fenced
-- repeat: fenced, no effect
-- uses: clock member waiting
local gid, i, token, kind, reason, text, delay_ms, forget = unpack(ARGV)
local g = group_key(gid)
check_types(kind == 'back' and 'q s d bell c' or 'q s d bell ' .. FAILING)
if call('ZREM', K .. 'l', gid .. ':' .. i .. ':' .. token) == 0 then return 'fenced' end
local state = group_values(g, 'state')[1]
if not state then met_vanished(gid) end
if state ~= 'open' then return 'fenced' end
local run = read(M, 'state', 'lease_ms', 'clock', 'clock_tick', 'paused_total', 'paused_at',
  'max_attempts')
local delay = tonumber(delay_ms)
-- What it had parked leads nowhere: the next attempt begins at the prompt.
if forget and call('HDEL', g, 'k' .. i) == 1 then call('HDEL', body_key(gid), 'p' .. i) end
local due = delay > 0 and clock_of(run) + delay or nil
if kind == 'back' then
  call('HINCRBY', K .. 'c', 'given_back', 1)
  send_back(gid, g, i, due)
  return 'back'
end
local attempts = call('HINCRBY', g, 'a' .. i, 1)
call('HINCRBY', K .. 'c', 'attempts', 1)
if kind == 'final' or attempts >= tonumber(run.max_attempts) then
  fail_member(gid, g, i, reason, text)
  return 'failed'
end
call('HSET', g, 'r' .. i, reason .. ' ' .. text) -- for people who look at a live group
send_back(gid, g, i, due)
return 'again'
