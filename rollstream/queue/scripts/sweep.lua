-- sweep: moves the queue clock and does one page of everything that came due.
-- argv: page
-- keys: m HASH, l ZSET, d ZSET, q ZSET, s ZSET, dl ZSET, age ZSET, g:<gid> HASH, b:<gid> HASH, gs SET, ge SET, full STREAM, ready STREAM, eval STREAM, past STREAM, cur STRING, c HASH, w ZSET, wp ZSET, wa ZSET, wl HASH, ws HASH, wh HASH, wc HASH, wb HASH, bell LIST, room LIST, ctl STREAM, vanished HASH
-- group: dropped last_member_ended kept requeued
-- member: came_due sent_back failed_finally group_ended requeued
-- answer: more expired promoted deadlines evicted aborted grace vanished | -1 (no such run)
-- repeat: the next page
-- uses: clock member waiting taking control streams pausing
-- lazily: ending looking rewinding staling
local STALE_PAGE, ABORT_PAGE = 16, 16
local MAX_ENDED = 512      -- members of groups that one page drops
local FORGET_LEASES = 4    -- a process unseen for so many leases is no longer present
local page = tonumber(ARGV[1])
permit_full_memory()
local run = read(M, 'state', 'lease_ms', 'clock', 'clock_tick', 'paused_total', 'paused_at',
  'version', 'max_stale', 'max_crashes', 'grace_until', 'rewinding', 'cursor', 'cursor_clock',
  'pause_until', 'on_stale')
if not run.state then return {-1} end
local clock, run_clock, jumped, now = clock_of(run)
local lease_ms = tonumber(run.lease_ms)
-- Nobody could beat while the server was away, so nothing expires for one lease.
local grace_until = jumped and clock + lease_ms or tonumber(run.grace_until)
if now < tonumber(run.clock_tick) then restart_idle_times() end
call('HSET', M, 'clock', int(clock), 'clock_tick', int(now), 'grace_until', int(grace_until))
local more = 0

local function full_page(count, size)
  if count >= size then more = 1 end
  return count
end

-- What people ask first of a member that crashed: which worker, where, and what went wrong before.
local function crash_text(g, i, token, crashes)
  local worker = string.match(token, '^[^-]*')
  local host, before = call('HGET', K .. 'wh', worker), call('HGET', g, 'r' .. i)
  return 'its worker died ' .. crashes .. (crashes == 1 and ' time' or ' times') .. ', the last one was ' .. worker
    .. (host and ' (' .. host .. ')' or '') .. (before and '; before that: ' .. before or '')
end

local function expire_leases()
  local due = call('ZRANGEBYSCORE', K .. 'l', '-inf', int(clock), 'LIMIT', 0, page)
  local expired = 0
  if #due > 0 then check_types('q s bell wh ' .. FAILING) end
  for _, lease_id in ipairs(due) do
    call('ZREM', K .. 'l', lease_id)
    local gid, i, token = split_lease(lease_id)
    local g = gid and group_key(gid)
    local row = g and group_values(g, 'state', 'f' .. i, 't' .. i) or {}
    if not row[1] then met_vanished(gid) end
    if row[1] == 'open' and not row[2] and row[3] == token then
      local crashes = call('HINCRBY', g, 'x' .. i, 1)
      expired = expired + 1
      if crashes >= tonumber(run.max_crashes) then
        fail_member(gid, g, i, 'crashed', crash_text(g, i, token, crashes))
      else
        send_back(gid, g, i)
      end
    end
  end
  if expired > 0 then call('HINCRBY', K .. 'c', 'crashes', expired) end
  full_page(#due, page)
  return expired
end

-- Ends members without an end, some hundred a call. Returns how many, and where to go on (nil: all
-- have an end now).
local function fail_unfinished(gid, g, n, from)
  local ended = 0
  for first = from, n - 1, CHUNK do
    if ended >= MAX_ENDED then return ended, first end
    local members = take_out_some(gid, g, first, math.min(first + CHUNK, n) - 1)
    fail_members(gid, g, members, 'deadline', 'the deadline of the group passed')
    ended = ended + #members
  end
  return ended, nil
end

local function end_deadlines()
  local due = call('ZRANGEBYSCORE', K .. 'dl', '-inf', int(run_clock), 'LIMIT', 0, page)
  local ended, work = 0, 0
  if #due > 0 then check_types('q s d l ' .. FAILING) end
  for _, gid in ipairs(due) do
    if work >= page then more = 1; break end
    local g = group_key(gid)
    local row = read_group(g, 'state', 'n', 'ended_to')
    if row.state == 'open' then
      local members, rest = fail_unfinished(gid, g, tonumber(row.n), tonumber(row.ended_to or 0))
      work = work + members
      if rest then
        call('HSET', g, 'ended_to', rest) -- it stays due for the next page
        more = 1
        break
      end
      ended = ended + 1
    end
    if not is_evaluation(gid) then
      call('ZREM', K .. 'dl', gid)
    elseif row.state == 'open' then
      call('ZADD', K .. 'dl', int(run_clock + lease_ms), gid) -- whoever asked for it may take it
    elseif row.state then
      work = work + (end_group(gid, 'dropped', 'deadline', 'nobody acked the evaluation') or 0)
      ended = ended + 1
    else
      call('ZREM', K .. 'dl', gid) -- the walk ends it
    end
  end
  full_page(#due, page)
  return ended
end

-- A stale group may begin anew instead. Returns the size of what ended.
local function end_one(gid, reason)
  if reason == 'stale' then return (end_stale(gid)) end
  return end_group(gid, 'dropped', reason, '', true)
end

-- Ends groups until their members make a call long enough; the next page does the rest.
local function end_groups(gids, reason)
  local ended, members = 0, 0
  for _, gid in ipairs(gids) do
    if members >= MAX_ENDED then more = 1; break end
    if call('EXISTS', group_key(gid)) == 1 then
      members = members + (end_one(gid, reason) or 0)
      ended = ended + 1
    else
      walk_to(gid) -- it ends when nothing of it is left
    end
  end
  return ended
end

local function evict_stale()
  local max_stale = tonumber(run.max_stale or -1)
  if max_stale < 0 or run.on_stale == 'deliver' then return 0 end
  -- A failed run keeps its groups as they are, and an aborted one has another reason to drop them.
  if run.state ~= 'running' and run.state ~= 'paused' then return 0 end
  local oldest = int(tonumber(run.version) - max_stale)
  local stale = call('ZRANGEBYSCORE', K .. 'age', '-inf', '(' .. oldest, 'LIMIT', 0, STALE_PAGE)
  full_page(#stale, STALE_PAGE)
  return end_groups(stale, 'stale')
end

local function abort_groups()
  if run.state ~= 'aborting' then return 0 end
  local groups = call('SRANDMEMBER', K .. 'gs', ABORT_PAGE)
  for _, gid in ipairs(call('SRANDMEMBER', K .. 'ge', ABORT_PAGE)) do groups[#groups + 1] = gid end
  if #groups > 0 then
    more = 1
    return end_groups(groups, 'run_aborted')
  end
  call('HSET', M, 'state', 'ended')
  announce('ended')
  return 0
end

local function forget_absent()
  local limit = int(clock - FORGET_LEASES * lease_ms)
  for _, set in ipairs({'w', 'wp', 'wa'}) do
    for _, name in ipairs(call('ZRANGEBYSCORE', K .. set, '-inf', limit, 'LIMIT', 0, page)) do
      call('ZREM', K .. set, name)
      call('HDEL', K .. 'wh', name)
      if set == 'wp' then call('HDEL', K .. 'wb', name) end
      if set == 'w' then
        call('HDEL', K .. 'wl', name)
        call('HDEL', K .. 'ws', name)
        call('HDEL', K .. 'wc', name)
      end
    end
  end
end

-- A lease that was made shorter: nobody beats those of a worker that died before.
local function shorten_leases()
  local latest = int(clock + lease_ms)
  local long = call('ZRANGEBYSCORE', K .. 'l', '(' .. latest, '+inf', 'LIMIT', 0, page)
  for _, lease_id in ipairs(long) do call('ZADD', K .. 'l', latest, lease_id) end
  full_page(#long, page)
end

-- Whoever paused the run said how long at most, and is late: the run goes on without it.
local function end_overdue_pause()
  local pause_until = tonumber(run.pause_until or 0)
  if run.state ~= 'paused' or pause_until == 0 or clock < pause_until then return end
  check_types('ctl bell c')
  end_pause(run, clock)
  call('HINCRBY', K .. 'c', 'pauses_expired', 1)
  announce('resume')
end

end_overdue_pause()
shorten_leases()
local in_grace = clock < grace_until
local expired = in_grace and 0 or expire_leases()
local promoted = full_page(promote(clock, page), page)
local deadlines = end_deadlines()
local evicted = evict_stale()
local aborted = abort_groups()
forget_absent()
-- A trainer that rewound and died before all was dropped.
if run.rewinding then
  local _, _, is_left = drop_rewound(run.rewinding)
  if is_left then more = 1 end
end
local num_vanished, is_walk_due = 0, clock - tonumber(run.cursor_clock or 0) >= lease_ms / 2
if run.cursor or is_walk_new or is_walk_due then
  local is_more
  is_more, num_vanished = look(clock)
  if is_more then more = 1 end
end
return {more, expired, promoted, deadlines, evicted, aborted, in_grace and 1 or 0, num_vanished}
