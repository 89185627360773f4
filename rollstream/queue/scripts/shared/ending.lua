-- ending: a group ends as acked or dropped, and nothing of it is left.
-- uses: wake frontier
local CHUNK = 512       -- Lua unpacks at most some thousands of values
local PAST_LENGTH = 1000
local PAST_MEMBERS = 8  -- members whose header and error a drop's record keeps

-- Takes every member that waits or is leased from its set.
local function take_out_members(gid, g, n)
  for first = 0, n - 1, CHUNK do
    local last = math.min(first + CHUNK - 1, n - 1)
    local names = {}
    for i = first, last do names[#names + 1] = 'f' .. i; names[#names + 1] = 't' .. i end
    local values, waiting, leased = call('HMGET', g, unpack(names)), {}, {}
    for i = first, last do
      local final, token = values[2 * (i - first) + 1], values[2 * (i - first) + 2]
      if not final then
        waiting[#waiting + 1] = gid .. ':' .. i
        if token then leased[#leased + 1] = gid .. ':' .. i .. ':' .. token end
      end
    end
    if #waiting > 0 then
      for _, set in ipairs({'q', 's', 'd'}) do call('ZREM', K .. set, unpack(waiting)) end
    end
    if #leased > 0 then call('ZREM', K .. 'l', unpack(leased)) end
  end
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

-- Takes a live group from everywhere that refers to it, but for the set of live groups.
local function take_out_group(gid, g, row)
  if row.state == 'open' then
    take_out_members(gid, g, tonumber(row.n))
  elseif row.state == 'full' then
    remove_entry('full', 'aggregators', row.full_id)
  elseif row.state then
    remove_entry('ready', 'trainer', row.ready_id)
  end
  if row.state == 'delivered' then
    call('HINCRBY', M, 'delivered', -1)
  else
    call('ZREM', K .. 'age', gid)
  end
  call('ZREM', K .. 'dl', gid)
end

-- Ends a live group; false where it is not live. `keep_id` leaves its id free to come again.
local function end_group(gid, outcome, reason, detail, keep_id)
  local evaluation = is_evaluation(gid)
  if call('SREM', K .. (evaluation and 'ge' or 'gs'), gid) == 0 then return false end
  local g = group_key(gid)
  local row = read(g, 'state', 'n', 'full_id', 'ready_id', 'why')
  take_out_group(gid, g, row)
  if outcome == 'dropped' then remember_drop(gid, g, row, reason, detail) end
  call('UNLINK', g, body_key(gid))
  local counter = outcome == 'dropped' and 'dropped:' .. reason or outcome
  call('HINCRBY', K .. 'c', (evaluation and 'e.' or '') .. counter, 1)
  if not keep_id then mark_terminal(gid) end
  ring('room')
  return true
end
