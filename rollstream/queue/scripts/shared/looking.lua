-- looking: a walk over everything, some pages a sweep. It ends groups whose keys vanished, takes
-- away what refers to no group, and writes again the stream entries that groups have lost.
-- `cursor` of the run says where it stands: a stage and a cursor. A group whose hash is gone is named
-- in `vanished` first, then its members are taken out, and only then it ends: it is live until
-- nothing of it is left, so its id cannot come again too early.
-- uses: ending control streams damage
-- gives: look
local LOOK_BUDGET, LOOK_PAGE = 256, 64 -- groups, entries and members a sweep; a page of them
local NEXT_STAGE = {gs = 'ge', ge = 'full', full = 'ready', ready = 'eval', eval = 'l', l = 'q',
                    q = 's', s = 'd', d = 'vanished'}
local CONSUMERS = {full = 'aggregators', ready = 'trainer'} -- of `eval` there are none
local num_vanished, scan_again = 0, false

local function end_vanished(gid, detail, no_traces)
  num_vanished = num_vanished + 1
  call('HINCRBY', K .. 'c', (is_evaluation(gid) and 'e.' or '') .. 'vanished', 1)
  scan_again = scan_again or not is_evaluation(gid)
  end_group(gid, 'dropped', 'withdrawn', detail, true, no_traces)
end

-- `hash`, `none`, or another one, of a program that is not ours: such a key is removed.
local function type_of(key)
  local kind = call('TYPE', key).ok
  if kind ~= 'hash' and kind ~= 'none' then call('UNLINK', key) end
  return kind
end

local function has_parked(g, n)
  for first = 0, n - 1, CHUNK do
    local names = {}
    for i = first, math.min(first + CHUNK, n) - 1 do names[#names + 1] = 'k' .. i end
    for _, size in ipairs(call('HMGET', g, unpack(names))) do
      if size then return true end
    end
  end
  return false
end

local last_read = nil -- what aggregators were given of `full`, up to where

local function is_behind(message, last)
  local ms, seq = string.match(message, '^(%d+)-(%d+)$')
  local last_ms, last_seq = string.match(last, '^(%d+)-(%d+)$')
  if ms ~= last_ms then return tonumber(ms) < tonumber(last_ms) end
  return tonumber(seq) <= tonumber(last_seq)
end

-- An entry that was given to a consumer, and whose consumer was deleted, comes to nobody again.
-- (The trainer reads its stream from the start when it idles.)
local function is_forgotten(message)
  if not last_read then
    local group = redis.pcall('XINFO', 'GROUPS', K .. 'full')[1] or {}
    for j = 1, #group, 2 do
      if group[j] == 'last-delivered-id' then last_read = group[j + 1] end
    end
  end
  return last_read and is_behind(message, last_read)
    and #call('XPENDING', K .. 'full', 'aggregators', message, message, 1) == 0
end

local function restore_entry(gid, g, n, stream, field, message)
  if message and #call('XRANGE', K .. stream, message, message) == 1 then
    if stream ~= 'full' or not is_forgotten(message) then return end
    call('XDEL', K .. stream, message)
  end
  call('HSET', g, field, call('XADD', K .. stream, '*', 'g', gid, 'n', n))
end

-- Returns how much was done, in members ended.
local function look_at_group(gid)
  local g = group_key(gid)
  local row = read_group(g, 'state', 'n', 'left', 'failed', 'parked', 'full_id', 'ready_id')
  if not row.state then
    call('UNLINK', g) -- another program's, or what is left of a hash
    if call('HEXISTS', K .. 'vanished', gid) == 1 then return 0 end
    call('HSET', K .. 'vanished', gid, was_delivered(gid) and 'delivered' or 'open')
    return 2
  end
  local n = tonumber(row.n)
  local has_results = n - tonumber(row.left) - tonumber(row.failed or 0) > 0
  local kind = type_of(body_key(gid))
  if kind == 'none' and not has_results and row.parked then has_results = has_parked(g, n) end
  if kind ~= 'hash' and (has_results or kind ~= 'none') then
    end_vanished(gid, 'its results vanished')
    return n
  end
  if row.state == 'full' then
    restore_entry(gid, g, n, 'full', 'full_id', row.full_id)
  elseif row.state ~= 'open' then
    local stream = is_evaluation(gid) and 'eval' or 'ready'
    restore_entry(gid, g, n, stream, 'ready_id', row.ready_id)
  end
  return 0
end

-- Each of these returns where to go on (nil at the end of its stage) and how much it looked at.
local function look_at_groups(set, cursor)
  local reply, ended = call('SSCAN', K .. set, cursor, 'COUNT', LOOK_PAGE), 0
  for _, gid in ipairs(reply[2]) do
    ended = ended + look_at_group(gid)
    if ended >= LOOK_BUDGET then return cursor, LOOK_BUDGET end
  end
  return reply[1] ~= '0' and reply[1] or nil, #reply[2]
end

local function look_at_entries(stream, cursor)
  local entries = call('XRANGE', K .. stream, '(' .. cursor, '+', 'COUNT', LOOK_PAGE)
  for _, entry in ipairs(entries) do
    local gid = nil
    for j = 1, #entry[2], 2 do
      if entry[2][j] == 'g' then gid = entry[2][j + 1] end
    end
    cursor = entry[1]
    if gid then -- an entry that names no group is not ours
      local field = stream == 'full' and 'full_id' or 'ready_id'
      local row = read_group(group_key(gid), 'state', field)
      local is_kept = row.state == 'ready' or row.state == 'delivered'
      local fits = (stream == 'full' and row.state == 'full')
        or (stream ~= 'full' and is_kept and (stream == 'eval') == is_evaluation(gid))
      if not fits or row[field] ~= cursor then remove_entry(stream, CONSUMERS[stream], cursor) end
    end
  end
  return #entries == LOOK_PAGE and cursor or nil, #entries
end

local function look_at_members(set, cursor)
  local reply, is_there = call('ZSCAN', K .. set, cursor, 'COUNT', LOOK_PAGE), {}
  for j = 1, #reply[2], 2 do
    local id = reply[2][j]
    local gid = group_in(set, id)
    if gid and is_there[gid] == nil then is_there[gid] = call('EXISTS', group_key(gid)) == 1 end
    if not gid or not is_there[gid] then
      if gid then met_vanished(gid) end
      call('ZREM', K .. set, id)
    end
  end
  return reply[1] ~= '0' and reply[1] or nil, #reply[2] / 2
end

local function end_all_vanished()
  local gids = call('HRANDFIELD', K .. 'vanished', LOOK_PAGE)
  for _, gid in ipairs(gids) do
    if call('EXISTS', group_key(gid)) == 0 then
      end_vanished(gid, 'its record vanished', true)
    end
    call('HDEL', K .. 'vanished', gid)
  end
  return #gids == LOOK_PAGE and '0' or nil, LOOK_BUDGET -- an end costs more than a look
end

local function look_at_page(stage, cursor)
  if stage == 'gs' or stage == 'ge' then return look_at_groups(stage, cursor) end
  if stage == 'vanished' then return end_all_vanished() end
  if string.match(' l q s d ', ' ' .. stage .. ' ') then return look_at_members(stage, cursor) end
  return look_at_entries(stage, cursor)
end

-- Does some pages of the walk, which begins anew where there is none; returns whether it is not at its
-- end, and how many groups it ended.
local function look(clock)
  is_walk_new = false
  local place = call('HGET', M, 'cursor')
  if not place then
    place = 'gs 0'
    call('HSET', M, 'cursor_clock', int(clock))
  end
  if place == 'gs 0' then make_streams() end
  local stage, cursor = string.match(place, '^(%S+) (%S+)$')
  local budget = LOOK_BUDGET
  while stage and budget > 0 and not is_walk_new do
    local rest, seen = look_at_page(stage, cursor)
    budget = budget - seen
    cursor = rest
    if not cursor then
      stage, cursor = NEXT_STAGE[stage], '0'
      -- Members are looked at only where a group has vanished: they are many.
      if stage == 'l' and call('EXISTS', K .. 'vanished') == 0 then stage = nil end
    end
  end
  if scan_again then
    call('HSET', M, 'done', 0)
    announce('epoch', call('HINCRBY', M, 'epoch', 1))
  end
  if is_walk_new then return true, num_vanished end
  if stage then
    call('HSET', M, 'cursor', stage .. ' ' .. cursor)
  else
    call('HDEL', M, 'cursor')
  end
  return stage ~= nil, num_vanished
end
