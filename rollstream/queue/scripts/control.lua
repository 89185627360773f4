-- control: connect of a trainer, weight version and labels, pause, resume, drain, engines, one budget. All are absolute.
-- argv: connect consumer number | version v label | label v label | pause mode deadline_ms [trainer] | resume [trainer] | drain (0|1) | engines json | set budget value | by consumer and any of these but connect
-- keys: m HASH, lb HASH, d ZSET, ctl STREAM, bell LIST, c HASH
-- group: -
-- member: -
-- answer: state version control_seq epoch consumer connects rewind_id (another consumer than `by`: nothing was changed) | lost | unknown
-- repeat: the same answer, nothing is written but a pause's deadline, which begins anew
-- uses: clock wake control types pausing
local BUDGETS = {cap = true, W = true, lease_ms = true, max_attempts = true, max_crashes = true,
                 max_requeues = true, max_stale = true, max_body = true, on_stale = true,
                 max_drops = true}
local ON_STALE = {drop = true, requeue = true, deliver = true}
local MAX_LABELS = 64
permit_full_memory()
local run = read(M, 'state', 'lease_ms', 'clock', 'clock_tick', 'paused_total', 'paused_at',
  'version', 'connects', 'pause_mode', 'pause_by', 'consumer', 'draining')
if not run.state then return {'lost'} end
local clock = clock_of(run)
local change = {}

-- A number that is not higher changes nothing: the answer says who is connected, and the caller
-- tells from it whether it is itself, was taken over, or the server lost its last second.
function change.connect(consumer, number)
  if tonumber(number) <= tonumber(run.connects) then return false end
  call('HSET', M, 'consumer', consumer, 'connects', number)
  return true
end

-- A label that comes back means the newer version: versions never go down. The lowest go first, of
-- one version the first by name.
function change.label(version, label)
  local known = tonumber(call('HGET', K .. 'lb', label) or -1)
  if label == '' or tonumber(version) <= known then return false end
  call('HSET', K .. 'lb', label, version)
  while call('HLEN', K .. 'lb') > MAX_LABELS do
    local labels = call('HGETALL', K .. 'lb')
    local oldest, lowest = labels[1], tonumber(labels[2]) or -1
    for j = 3, #labels, 2 do
      local number = tonumber(labels[j + 1]) or -1
      if number < lowest or (number == lowest and labels[j] < oldest) then
        oldest, lowest = labels[j], number
      end
    end
    call('HDEL', K .. 'lb', oldest)
  end
  return call('HEXISTS', K .. 'lb', label) == 1
end

function change.version(version, label)
  if tonumber(version) <= tonumber(run.version) then return false end
  call('HSET', M, 'version', version, 'label', label or '')
  change.label(version, label or '')
  -- Without a name it is called by its number, whatever had that name before.
  if (label or '') == '' and call('HEXISTS', K .. 'lb', version) == 1 then
    change.label(version, version)
  end
  return true
end

-- The deadline is not announced: it is the sweeps' business. Whose pause it is, is remembered.
function change.pause(mode, deadline_ms, who)
  if run.state ~= 'running' and run.state ~= 'paused' then return false end
  local deadline = tonumber(deadline_ms or 0)
  local pause_until = deadline > 0 and int(clock + deadline) or '0'
  if run.state == 'paused' then
    call('HSET', M, 'pause_until', pause_until, 'pause_mode', mode, 'pause_by', who or '')
    return run.pause_mode ~= mode
  end
  call('HSET', M, 'state', 'paused', 'paused_at', int(clock), 'pause_mode', mode,
    'pause_until', pause_until, 'pause_by', who or '')
  call('HINCRBY', K .. 'c', 'pauses', 1)
  return true
end

-- A trainer ends the pause of its own; one that somebody set since then stays.
function change.resume(who)
  if run.state ~= 'paused' or (who and who ~= run.pause_by) then return false end
  end_pause(run, clock)
  return true
end

-- While it is 1, `enqueue` takes no training group; what lives goes on to its end.
function change.drain(on)
  if (run.draining or '0') == on then return false end
  call('HSET', M, 'draining', on)
  return true
end

-- Empty: every worker's own configuration.
function change.engines(urls)
  if (call('HGET', M, 'engines') or '') == urls then return false end
  if urls == '' then call('HDEL', M, 'engines') else call('HSET', M, 'engines', urls) end
  return true
end

function change.set(budget, value)
  if call('HGET', M, budget) == value then return false end
  call('HSET', M, budget, value)
  return true
end

check_types('ctl bell c lb')
local op, first, second, third = unpack(ARGV)
-- A trainer that a later one followed, or that the server forgot, changes nothing.
local is_theirs = false
if op == 'by' then
  is_theirs = run.consumer ~= first
  op, first, second, third = unpack(ARGV, 3)
end
if not change[op] or (op == 'set' and not BUDGETS[first]) then return {'unknown'} end
if op == 'drain' and first ~= '0' and first ~= '1' then return {'unknown'} end
if op == 'set' and first == 'on_stale' and not ON_STALE[second] then return {'unknown'} end
if not is_theirs and change[op](first, second, third) then
  announce(op, op ~= 'resume' and first or nil)
end
return call('HMGET', M, 'state', 'version', 'control_seq', 'epoch', 'consumer', 'connects',
  'rewind_id')
