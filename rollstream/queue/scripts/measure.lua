-- measure: how old the oldest group of each queue is, who is seen alive, and whether the trainer waits. Read-only.
-- argv: -
-- keys: m HASH, q ZSET, g:<gid> HASH, full STREAM, ready STREAM, w ZSET, wp ZSET, wa ZSET
-- group: -
-- member: -
-- answer: the ages of queued full ready delivered (ms, -1 for none), workers producers aggregators, trainer (none, waiting, here, left) and its connection | lost
-- repeat: the same answer
-- uses: clock ids groups
local PRIORITY_STEP = 1099511627776 -- as in `enqueue`
local MAX_PRIORITIES, HEADS = 8, 64
local PAGE, MAX_ENTRIES = 64, 4096
local ALIVE_LEASES = 4 -- a process unseen for so many leases is no longer present
local run = read(M, 'state', 'lease_ms', 'clock', 'clock_tick', 'consumer', 'trainer')
if not run.state then return {'lost'} end
local now = now_ms()

local function age(since)
  return since and math.max(0, now - since) or -1
end

-- When the oldest of the members in `q` began to wait there. The lowest score is the oldest of its
-- priority, but for what came back or began anew: it is in front, and younger.
local function oldest_queued()
  local oldest, from = nil, '-inf'
  for _ = 1, MAX_PRIORITIES do
    local heads = call('ZRANGEBYSCORE', K .. 'q', from, '+inf', 'WITHSCORES', 'LIMIT', 0, HEADS)
    if #heads == 0 then break end
    local priority = math.floor(tonumber(heads[2]) / PRIORITY_STEP)
    for j = 1, #heads, 2 do
      local gid, i = split_member(heads[j])
      if gid and math.floor(tonumber(heads[j + 1]) / PRIORITY_STEP) == priority then
        local row = group_values(group_key(gid), 'w' .. i, 'since')
        local since = tonumber(row[1] or row[2] or '')
        if since and (not oldest or since < oldest) then oldest = since end
      end
    end
    from = int((priority + 1) * PRIORITY_STEP)
  end
  return oldest
end

local function entry_ms(id) return tonumber(string.match(id, '^(%d+)-')) end

local function group_of(entry)
  for j = 1, #entry[2], 2 do
    if entry[2][j] == 'g' then return entry[2][j + 1] end
  end
end

-- When the oldest group in the trainer's hands became ready, and the oldest that it does not have.
local function oldest_ready()
  local found, cursor, looked = {}, '-', 0
  repeat
    local entries = call('XRANGE', K .. 'ready', cursor, '+', 'COUNT', PAGE)
    for _, entry in ipairs(entries) do
      local gid = group_of(entry)
      local state = gid and group_values(group_key(gid), 'state')[1]
      if state and not found[state] then found[state] = entry_ms(entry[1]) end
      if found.ready and found.delivered then return found end
      cursor = '(' .. entry[1]
    end
    looked = looked + #entries
  until #entries < PAGE or looked >= MAX_ENTRIES
  return found
end

-- The queue clock stands still where nobody sweeps any more, so the time since then counts too.
local alive_from = '(' .. int(tonumber(run.clock) + now - tonumber(run.clock_tick)
  - ALIVE_LEASES * tonumber(run.lease_ms))

local function alive(set) return call('ZCOUNT', K .. set, alive_from, '+inf') end

local function trainer()
  if (run.consumer or '') == '' then return 'none', '' end
  local consumer, connection, word = string.match(run.trainer or '', '^(%S+) (%S+) (%S+)$')
  if consumer ~= run.consumer then return 'here', '' end -- one that says nothing of itself
  local until_ms = tonumber(word)
  if not until_ms then return word, connection end
  return now < until_ms and 'waiting' or 'here', connection
end

local full = call('XRANGE', K .. 'full', '-', '+', 'COUNT', 1)[1]
local ready = oldest_ready()
local state, connection = trainer()
return {age(oldest_queued()), age(full and entry_ms(full[1])), age(ready.ready),
  age(ready.delivered), alive('w'), alive('wp'), alive('wa'), state, connection}
