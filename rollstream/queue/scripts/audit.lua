-- audit: proves enqueued = acked + dropped + live and, deep, that everything is in its one place. Read-only.
-- argv: [deep]
-- keys: m HASH, c HASH, gs SET, ge SET, g:<gid> HASH, b:<gid> HASH, q ZSET, s ZSET, d ZSET, l ZSET, age ZSET, dl ZSET, full STREAM, ready STREAM, eval STREAM, cur STRING
-- group: -
-- member: -
-- answer: enqueued acked dropped live problem*
-- repeat: the same answer
-- uses: frontier groups
local MAX_PROBLEMS = 20
local problems = {}

local function problem(...)
  if #problems < MAX_PROBLEMS then
    local words = {...}
    for j, word in ipairs(words) do words[j] = tostring(word) end
    problems[#problems + 1] = table.concat(words, ' ')
  end
end

local function number(value) return tonumber(value or 0) or 0 end

local enqueued, acked, dropped, counters = 0, 0, 0, call('HGETALL', K .. 'c')
for j = 1, #counters, 2 do
  local name, count = counters[j], tonumber(counters[j + 1])
  if name == 'enqueued' then enqueued = count end
  if name == 'acked' then acked = count end
  if string.sub(name, 1, 8) == 'dropped:' then dropped = dropped + count end
end
local live = call('SCARD', K .. 'gs')
if enqueued ~= acked + dropped + live then
  problem('the counts do not add up: enqueued', enqueued, 'acked', acked, 'dropped', dropped,
    'live', live)
end
if ARGV[1] ~= 'deep' then return {enqueued, acked, dropped, live, unpack(problems)} end

local run = read(M, 'frontier', 'base', 'delivered', 'rewinding')
local frontier, base = number(run.frontier), number(run.base)
local in_set = {q = 0, s = 0, d = 0, l = 0}
local in_state = {open = 0, full = 0, ready = 0, delivered = 0}
local in_eval = 0 -- evaluations that ended: they are in a stream of their own
local in_hand = 0 -- training groups that the trainer has: evaluations are not in its count
local in_index = {age = 0, dl = 0}

-- Returns whether the member is final and whether it failed.
local function check_member(gid, g, i)
  local id = gid .. ':' .. i
  local row = call('HMGET', g, 'f' .. i, 't' .. i, 'k' .. i)
  local final, token, parked, places = row[1], row[2], row[3], 0
  for _, set in ipairs({'q', 's', 'd'}) do
    if call('ZSCORE', K .. set, id) then
      places = places + 1
      in_set[set] = in_set[set] + 1
    end
  end
  if token and call('ZSCORE', K .. 'l', id .. ':' .. token) then
    places = places + 1
    in_set.l = in_set.l + 1
  end
  local failed = final and string.sub(final, 1, 2) == 'x:'
  local has_body = call('HEXISTS', body_key(gid), i) == 1
  if final and places ~= 0 then problem('an ended member waits:', id) end
  if not final and places ~= 1 then problem('member', id, 'is in', places, 'sets') end
  if final and failed == has_body then problem('body of', id, 'and its end disagree') end
  if not final and has_body then problem('a member without an end has a body:', id) end
  if (parked and 1 or 0) ~= call('HEXISTS', body_key(gid), 'p' .. i) then
    problem('parked body of', id, 'and its flag disagree')
  end
  return final and true or false, failed
end

local function check_entry(gid, stream, message)
  if not message or #call('XRANGE', K .. stream, message, message) ~= 1 then
    problem('group', gid, 'has no entry in', stream)
  end
end

local function check_group(gid, training)
  local g = group_key(gid)
  local row = read(g, 'state', 'n', 'left', 'failed', 'full_id', 'ready_id')
  if not row.state then return problem('a live group without a hash:', gid) end
  if not is_size(row.n) then return problem('n of', gid, 'is', row.n or 'missing') end
  if training and not run.rewinding and is_terminal(tonumber(gid), frontier, base) then
    problem('live and terminal:', gid)
  end
  local is_kept = row.state == 'ready' or row.state == 'delivered'
  if is_kept and not training then
    in_eval = in_eval + 1
  else
    in_state[row.state] = (in_state[row.state] or 0) + 1
  end
  if training and row.state == 'delivered' then in_hand = in_hand + 1 end
  local n, ended, failed = tonumber(row.n), 0, 0
  for i = 0, n - 1 do
    local is_final, has_failed = check_member(gid, g, i)
    if is_final then ended = ended + 1 end
    if has_failed then failed = failed + 1 end
  end
  if ended + number(row.left) ~= n then problem('left of', gid, 'is', row.left, 'ended', ended) end
  if failed ~= number(row.failed) then problem('failed of', gid, 'is', row.failed, 'not', failed) end
  if (row.state == 'open') ~= (ended < n) then problem(gid, 'is', row.state, 'ended', ended) end
  if row.state == 'full' then check_entry(gid, 'full', row.full_id) end
  if is_kept then check_entry(gid, training and 'ready' or 'eval', row.ready_id) end
  for index in pairs(in_index) do
    if call('ZSCORE', K .. index, gid) then in_index[index] = in_index[index] + 1 end
  end
  if row.state == 'delivered' and call('ZSCORE', K .. 'age', gid) then
    problem('a delivered group has an age:', gid)
  end
end

local function expect(what, found, wanted)
  if found ~= wanted then problem(what, 'has', found, 'entries, groups account for', wanted) end
end

for _, gid in ipairs(call('SMEMBERS', K .. 'gs')) do check_group(gid, true) end
for _, gid in ipairs(call('SMEMBERS', K .. 'ge')) do check_group(gid, false) end
for set, count in pairs(in_set) do expect(set, call('ZCARD', K .. set), count) end
for index, count in pairs(in_index) do expect(index, call('ZCARD', K .. index), count) end
expect('full', call('XLEN', K .. 'full'), in_state.full)
expect('ready', call('XLEN', K .. 'ready'), in_state.ready + in_state.delivered)
expect('eval', call('XLEN', K .. 'eval'), in_eval)
expect('delivered', number(run.delivered), in_hand)
if call('GETBIT', K .. 'cur', int(frontier - base)) == 1 then problem('the frontier is terminal') end
return {enqueued, acked, dropped, live, unpack(problems)}
