-- lease: a worker gets members to run, each under a token that no other call ever made.
-- argv: worker call_no limit
-- keys: m HASH, w ZSET, wl HASH, ws HASH, q ZSET, s ZSET, d ZSET, l ZSET, g:<gid> HASH, b:<gid> HASH, dl ZSET, age ZSET, full STREAM, eval STREAM, c HASH, bell LIST, vanished HASH
-- group: last_member_ended kept
-- member: leased came_due failed_finally
-- answer: state version control_seq [gid n remaining_ms prompt (member token attempts crashes parked_bytes)*]* | old | lost
-- repeat: the members of the last call_no that are still leased; a lower call_no is old
-- uses: clock groups waiting
-- lazily: member
local MAX_LEASE = 256
local MAX_PROMPT_BYTES = 4194304 -- of the prompts in an answer; the group that exceeds it is the last
local FAIR_SHARE = 8       -- members a call may always give, however many workers there are
local PROMOTE = 256
local MAX_SUSPECTS = 8     -- that share a worker
local ALONE_CRASHES = 3    -- from here on a suspect is the only one of its worker
local worker, call_no, limit = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
permit_full_memory()
local run = read(M, 'state', 'lease_ms', 'clock', 'clock_tick', 'paused_total', 'paused_at',
  'version', 'control_seq')
if not run.state then return {'lost'} end
local clock, run_clock = clock_of(run)
call('ZADD', K .. 'w', int(clock), worker)

local ids, repeated = {}, false
local record = call('HGET', K .. 'wl', worker)
if record then
  local last, members = string.match(record, '^(%d+) (.*)$')
  if call_no < tonumber(last) then return {'old'} end
  if call_no == tonumber(last) then
    repeated = true
    for id in string.gmatch(members, '%S+') do ids[#ids + 1] = id end
  end
end
if not repeated and run.state ~= 'running' then
  return {run.state, run.version, run.control_seq}
end

local held = {}        -- lease ids of suspects that this worker runs
local is_suspect = {}  -- ids of suspects taken now: their scores
local popped = {}      -- id and score of what was taken from `q`, behind the suspects in `ids`

local function crashes_of(gid, i) return tonumber(call('HGET', group_key(gid), 'x' .. i)) or 0 end

-- `training_limit`: ids that may be taken before one of a training group is; evaluations run first.
local function take_suspects(training_limit)
  local alone, taken = false, 0
  for lease_id in string.gmatch(call('HGET', K .. 'ws', worker) or '', '%S+') do
    if call('ZSCORE', K .. 'l', lease_id) then
      held[#held + 1] = lease_id
      if crashes_of(split_lease(lease_id)) >= ALONE_CRASHES then alone = true end
    end
  end
  while not alone and #held + taken < MAX_SUSPECTS and #ids < limit do
    local head = call('ZRANGE', K .. 's', 0, 0, 'WITHSCORES')
    local id = head[1]
    if not id or (tonumber(head[2]) >= 0 and #ids >= training_limit) then break end
    local gid, i = split_member(id)
    if gid and crashes_of(gid, i) >= ALONE_CRASHES then
      if #held + taken > 0 then break end
      alone = true
    end
    call('ZREM', K .. 's', id)
    if gid then
      ids[#ids + 1] = id
      is_suspect[id] = head[2]
      taken = taken + 1
    end
  end
end

if not repeated then
  promote(clock, PROMOTE)
  local queued, suspects = call('ZCARD', K .. 'q'), call('ZCARD', K .. 's')
  local share = math.ceil((queued + suspects) / call('ZCARD', K .. 'w'))
  limit = math.min(limit, MAX_LEASE, math.max(FAIR_SHARE, share))
  if suspects > 0 then
    check_types('bell')
    take_suspects(limit - call('ZCOUNT', K .. 'q', '-inf', '(0'))
  end
  local want = limit - #ids
  if queued > want then ring('bell') end  -- the next waiting worker
  if queued > 0 and want > 0 then
    popped = call('ZPOPMIN', K .. 'q', want)
    for j = 1, #popped, 2 do ids[#ids + 1] = popped[j] end
  end
end

-- Places in `ids` by group, groups in the order of their first place. What names no member was
-- written by somebody else, and is gone with this.
local groups, places_of, member_at = {}, {}, {}
for place, id in ipairs(ids) do
  local gid, i = split_member(id)
  if gid then
    member_at[place] = i
    local places = places_of[gid]
    if not places then
      places = {}
      places_of[gid] = places
      groups[#groups + 1] = gid
    end
    places[#places + 1] = place
  end
end

local token_prefix = worker .. '-' .. call_no .. '-'
local expires, leases = int(clock + tonumber(run.lease_ms)), {}
local first_leased = {} -- groups

-- The group's deadline and its version begin with its first lease.
local function first_lease(gid, g, timeout_ms)
  local deadline = timeout_ms > 0 and run_clock + timeout_ms or 0
  first_leased[#first_leased + 1] = gid
  call('HSET', g, 'deadline', int(deadline), 'version', run.version)
  if deadline > 0 then call('ZADD', K .. 'dl', int(deadline), gid) end
  if not is_evaluation(gid) then call('ZADD', K .. 'age', run.version, gid) end
  return deadline
end

local function lease_group(gid)
  local g, places = group_key(gid), places_of[gid]
  local names = {'state', 'n', 'deadline', 'timeout_ms', 'prompt'}
  for _, place in ipairs(places) do
    local i = member_at[place]
    names[#names + 1] = 'a' .. i
    names[#names + 1] = 'x' .. i
    names[#names + 1] = 'k' .. i
  end
  local values = group_values(g, unpack(names))
  if not is_size(values[2]) then values[1] = nil end
  if not values[1] and not repeated then met_vanished(gid) end
  if values[1] ~= 'open' then return nil end
  local deadline, timeout_ms = tonumber(values[3]), tonumber(values[4])
  if not repeated then
    deadline = deadline or first_lease(gid, g, timeout_ms)
    if deadline > 0 and deadline <= run_clock then
      check_types(FAILING)
      for _, place in ipairs(places) do
        local i = member_at[place]
        if tonumber(i) < tonumber(values[2]) then
          fail_member(gid, g, i, 'deadline', 'the deadline of the group passed')
        end
      end
      return nil
    end
  end
  local remaining = -1
  if deadline and deadline > 0 then
    remaining = math.max(0, math.min(deadline - run_clock, timeout_ms))
  end
  local row, tokens = {gid, tonumber(values[2]), remaining, values[5]}, {}
  for j, place in ipairs(places) do
    local i, id, token = member_at[place], ids[place], token_prefix .. place
    local lease_id = id .. ':' .. token
    local is_member = tonumber(i) < row[2]
    if not repeated and is_member then
      leases[#leases + 1] = expires
      leases[#leases + 1] = lease_id
      tokens[#tokens + 1] = 't' .. i
      tokens[#tokens + 1] = token
      if is_suspect[id] then held[#held + 1] = lease_id end
    end
    if is_member and (not repeated or call('ZSCORE', K .. 'l', lease_id)) then
      local at, value = #row, 3 * j + 3
      row[at + 1] = tonumber(i)
      row[at + 2] = token
      row[at + 3] = tonumber(values[value]) or 0
      row[at + 4] = tonumber(values[value + 1]) or 0
      row[at + 5] = tonumber(values[value + 2]) or 0
    end
  end
  if #tokens > 0 then call('HSET', g, unpack(tokens)) end
  return #row > 4 and row or nil
end

local answer = {run.state, run.version, run.control_seq}

-- Members that were taken and not looked at wait again where they waited. Their places stay empty,
-- since places are part of tokens.
local function give_back(gids)
  local num_suspects = #ids - #popped / 2
  for _, gid in ipairs(gids) do
    for _, place in ipairs(places_of[gid]) do
      local id = ids[place]
      local score = is_suspect[id] or popped[2 * (place - num_suspects)]
      call('ZADD', K .. (is_suspect[id] and 's' or 'q'), score, id)
      ids[place], is_suspect[id] = '-', nil
    end
  end
  if #gids > 0 then ring('bell') end
end

local function hand_out()
  local prompt_bytes = 0
  for j, gid in ipairs(groups) do
    local row = lease_group(gid)
    if row then
      answer[#answer + 1] = row
      prompt_bytes = prompt_bytes + #(row[4] or '')
      if prompt_bytes > MAX_PROMPT_BYTES and not repeated then
        give_back({unpack(groups, j + 1)})
        break
      end
    end
  end
  if #leases > 0 then call('ZADD', K .. 'l', unpack(leases)) end
  if next(is_suspect) then call('HSET', K .. 'ws', worker, table.concat(held, ' ')) end
  if not repeated and #ids > 0 then
    call('HSET', K .. 'wl', worker, call_no .. ' ' .. table.concat(ids, ' '))
  end
end

local ok, problem = pcall(hand_out)
if ok then return answer end

-- A key of the run is another program's: what was taken waits again where it waited.
for _, gid in ipairs(first_leased) do
  redis.pcall('ZREM', K .. 'dl', gid)
  redis.pcall('ZREM', K .. 'age', gid)
  call('HDEL', group_key(gid), 'deadline', 'version')
end
for _, id in ipairs(ids) do
  local gid, i = split_member(id)
  local row = gid and group_values(group_key(gid), 'score', 'f' .. i) or {}
  if row[1] and not row[2] then call('ZADD', K .. (is_suspect[id] and 's' or 'q'), row[1], id) end
end
return failure(problem)
