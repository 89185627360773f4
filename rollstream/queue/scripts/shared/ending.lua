-- ending: a group ends as acked or dropped, and nothing of it is left.
-- uses: wake frontier groups damage types taking entries
-- gives: end_group
local PAST_LENGTH = 1000
local PAST_MEMBERS = 512 -- members whose header and error a drop's record keeps, as far as they fit
local PAST_BYTES, PAST_ERROR = 16384, 300 -- of them all; of one error, once half of that is full

local function take_out_members(gid, g, n)
  for first = 0, n - 1, CHUNK do take_out_some(gid, g, first, math.min(first + CHUNK, n) - 1) end
end

local function remember_drop(gid, g, row, reason, detail)
  local record = {'g', gid, 'n', row.n or 0, 'reason', reason, 'detail', detail or '',
                  'state', row.state or '', 'why', row.why or ''}
  local n, size = math.min(tonumber(row.n or 0), PAST_MEMBERS), 0
  for first = 0, n - 1, 64 do
    local names = {}
    for i = first, math.min(first + 64, n) - 1 do
      for _, kind in ipairs({'h', 'e'}) do names[#names + 1] = kind .. i end
    end
    for j, value in ipairs(call('HMGET', g, unpack(names))) do
      if value then
        if size > PAST_BYTES / 2 and string.sub(names[j], 1, 1) == 'e' then
          value = string.sub(value, 1, PAST_ERROR)
        end
        size = size + #value
        if size > PAST_BYTES then
          record[#record + 1] = 'cut'; record[#record + 1] = string.sub(names[j], 2)
          break
        end
        record[#record + 1] = names[j]; record[#record + 1] = value
      end
    end
    if size > PAST_BYTES then break end
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
  for stream, consumers in pairs({full = 'aggregators', ready = 'trainer', eval = false}) do
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
local PLACES = ' q s d l full ready eval age dl c vanished'
-- By the group's state; whoever ends one without a hash looks everywhere.
local PLACES_OF = {open = 'q s d l age dl', full = 'full age', ready = 'ready eval age dl',
                   delivered = 'ready eval dl'}
local are_ours = {} -- what was checked already: most calls end many groups alike

-- Takes a live group from everywhere that refers to it, but for the set of live groups.
local function take_out_group(gid, g, row, no_traces)
  local delivered, evaluation = row.state == 'delivered', is_evaluation(gid)
  if row.state == 'open' then
    take_out_members(gid, g, tonumber(row.n))
  elseif row.state == 'full' then
    remove_entry('full', 'aggregators', row.full_id)
  elseif row.state and evaluation then
    remove_entry('eval', nil, row.ready_id)
  elseif row.state then
    remove_entry('ready', 'trainer', row.ready_id)
  else
    delivered = was_delivered(gid)
    if not no_traces then take_out_traces(gid) end
    call('HDEL', K .. 'vanished', gid)
  end
  if not delivered then
    call('ZREM', K .. 'age', gid)
  elseif not evaluation then
    call('HINCRBY', M, 'delivered', -1)
  end
  -- Whatever made it full has taken it from there, but for an evaluation.
  if row.state == 'open' or not row.state or evaluation then call('ZREM', K .. 'dl', gid) end
end

local function live_set(gid) return K .. (is_evaluation(gid) and 'ge' or 'gs') end

-- What is to be known of a group before it ends; refuses what could not be taken back.
local function before_end(gid, outcome)
  local row = read_group(group_key(gid), 'state', 'n', 'full_id', 'ready_id', 'why', 'env')
  local state = row.state or ''
  if are_ours[state] ~= outcome and (row.state or call('SISMEMBER', live_set(gid), gid) == 1) then
    check_types((outcome == 'dropped' and 'past c cur room ' or 'c cur room ')
      .. (PLACES_OF[state] or PLACES))
    are_ours[state] = outcome
  end
  return row
end

-- Ends a live group; false where it is not live, else its size. `keep_id` leaves its id free to
-- come again; `no_traces`: its hash vanished, and what was left of it is taken out; `row`: of
-- `before_end`, where that was called before.
local function end_group(gid, outcome, reason, detail, keep_id, no_traces, row)
  row = row or before_end(gid, outcome)
  if call('SREM', live_set(gid), gid) == 0 then return false end
  local g, evaluation = group_key(gid), is_evaluation(gid)
  take_out_group(gid, g, row, no_traces)
  if outcome == 'dropped' then remember_drop(gid, g, row, reason, detail) end
  call('UNLINK', g, body_key(gid))
  local counter = outcome == 'dropped' and 'dropped:' .. reason or outcome
  call('HINCRBY', K .. 'c', (evaluation and 'e.' or '') .. counter, 1)
  -- Once more by environment: whatever is counted above and not here is of none that is known.
  if (row.env or '') ~= '' and not evaluation then
    call('HINCRBY', K .. 'c', 'env:' .. counter .. ':' .. row.env, 1)
  end
  if not keep_id then mark_terminal(gid) end
  ring('room')
  return tonumber(row.n or 1)
end
