-- ending: a group ends as acked or dropped, and nothing of it is left.
-- uses: wake frontier groups damage types
local CHUNK = 512       -- Lua unpacks at most some thousands of values
local PAST_LENGTH = 1000
local PAST_MEMBERS = 8  -- members whose header and error a drop's record keeps

-- Takes members `first` to `last` (CHUNK at most) from their sets; returns those without an end.
local function take_out_some(gid, g, first, last)
  local names = {}
  for i = first, last do names[#names + 1] = 'f' .. i; names[#names + 1] = 't' .. i end
  local values, members, waiting, leased = call('HMGET', g, unpack(names)), {}, {}, {}
  for i = first, last do
    local final, token = values[2 * (i - first) + 1], values[2 * (i - first) + 2]
    if not final then
      members[#members + 1] = i
      waiting[#waiting + 1] = gid .. ':' .. i
      if token then leased[#leased + 1] = gid .. ':' .. i .. ':' .. token end
    end
  end
  -- Each of them is in exactly one set: what was found need not be looked for elsewhere.
  local left = #waiting
  if #leased > 0 then left = left - call('ZREM', K .. 'l', unpack(leased)) end
  for _, set in ipairs({'q', 's', 'd'}) do
    if left > 0 then left = left - call('ZREM', K .. set, unpack(waiting)) end
  end
  return members
end

local function take_out_members(gid, g, n)
  for first = 0, n - 1, CHUNK do take_out_some(gid, g, first, math.min(first + CHUNK, n) - 1) end
end

local function remove_entry(stream, consumers, message)
  call('XACK', K .. stream, consumers, message)
  call('XDEL', K .. stream, message)
end

local function remember_drop(gid, g, row, reason, detail)
  local record = {'g', gid, 'n', row.n or 0, 'reason', reason, 'detail', detail or '',
                  'state', row.state or '', 'why', row.why or ''}
  local names = {}
  for i = 0, math.min(tonumber(row.n or 0), PAST_MEMBERS) - 1 do
    for _, kind in ipairs({'h', 'e'}) do names[#names + 1] = kind .. i end
  end
  if #names > 0 then
    local values = call('HMGET', g, unpack(names))
    for j, name in ipairs(names) do
      if values[j] then record[#record + 1] = name; record[#record + 1] = values[j] end
    end
  end
  call('XADD', K .. 'past', 'MAXLEN', '~', PAST_LENGTH, '*', unpack(record))
end

-- Whether a group without a hash had been handed out: from its first lease until then it is in
-- `age`, and before its first lease all its members are in `q`.
local function was_delivered(gid)
  local known = call('HGET', K .. 'vanished', gid)
  if known then return known == 'delivered' end
  return not is_evaluation(gid) and not call('ZSCORE', K .. 'age', gid)
    and not call('ZSCORE', K .. 'q', gid .. ':0')
end

-- The group of an entry of q, s, d or l.
local function group_in(set, id)
  return string.match(id, set == 'l' and '^(.*):%d+:[^:]*$' or '^(.*):%d+$')
end

-- Takes out what is left of a group without a hash: it has to be looked for everywhere.
local function take_out_traces(gid)
  for set in string.gmatch('q s d l', '%S') do
    local first = 0
    repeat
      local ids, found = call('ZRANGE', K .. set, first, first + CHUNK - 1), {}
      for _, id in ipairs(ids) do
        if group_in(set, id) == gid then found[#found + 1] = id end
      end
      if #found > 0 then call('ZREM', K .. set, unpack(found)) end
      first = first + #ids - #found
    until #ids < CHUNK
  end
  for stream, consumers in pairs({full = 'aggregators', ready = 'trainer'}) do
    for _, entry in ipairs(call('XRANGE', K .. stream, '-', '+')) do
      for j = 1, #entry[2], 2 do
        if entry[2][j] == 'g' and entry[2][j + 1] == gid then
          remove_entry(stream, consumers, entry[1])
        end
      end
    end
  end
end

-- What a group is taken out of, and where that is counted.
local PLACES = ' q s d l full ready age dl c vanished'
local are_places_ours = false

-- Takes a live group from everywhere that refers to it, but for the set of live groups.
local function take_out_group(gid, g, row, no_traces)
  local delivered = row.state == 'delivered'
  if row.state == 'open' then
    take_out_members(gid, g, tonumber(row.n))
  elseif row.state == 'full' then
    remove_entry('full', 'aggregators', row.full_id)
  elseif row.state then
    remove_entry('ready', 'trainer', row.ready_id)
  else
    delivered = was_delivered(gid)
    if not no_traces then take_out_traces(gid) end
    call('HDEL', K .. 'vanished', gid)
  end
  if not delivered then
    call('ZREM', K .. 'age', gid)
  elseif not is_evaluation(gid) then
    call('HINCRBY', M, 'delivered', -1)
  end
  -- Whatever made it full has taken it from there.
  if row.state == 'open' or not row.state then call('ZREM', K .. 'dl', gid) end
end

-- Ends a live group; false where it is not live, else its size. `keep_id` leaves its id free to
-- come again; `no_traces`: its hash vanished, and what was left of it is taken out.
local function end_group(gid, outcome, reason, detail, keep_id, no_traces)
  local evaluation = is_evaluation(gid)
  if not are_places_ours then
    check_types('cur past room' .. PLACES)
    are_places_ours = true
  end
  if call('SREM', K .. (evaluation and 'ge' or 'gs'), gid) == 0 then return false end
  local g = group_key(gid)
  local row = read_group(g, 'state', 'n', 'full_id', 'ready_id', 'why')
  take_out_group(gid, g, row, no_traces)
  if outcome == 'dropped' then remember_drop(gid, g, row, reason, detail) end
  call('UNLINK', g, body_key(gid))
  local counter = outcome == 'dropped' and 'dropped:' .. reason or outcome
  call('HINCRBY', K .. 'c', (evaluation and 'e.' or '') .. counter, 1)
  if not keep_id then mark_terminal(gid) end
  ring('room')
  return tonumber(row.n or 1)
end
