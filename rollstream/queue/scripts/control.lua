-- control: connect of a trainer, weight version, pause, resume, one budget. All are absolute.
-- argv: connect consumer number | version v label | pause mode | resume | set budget value
-- keys: m HASH, d ZSET, ctl STREAM, bell LIST
-- group: -
-- member: -
-- answer: state version control_seq epoch consumer connects rewind_id | lost | unknown
-- repeat: the same answer, nothing is written
-- uses: clock wake control types
local BUDGETS = {cap = true, W = true, lease_ms = true, max_attempts = true, max_crashes = true,
                 max_requeues = true, max_stale = true, max_body = true}
permit_full_memory()
local run = read(M, 'state', 'lease_ms', 'clock', 'clock_tick', 'paused_total', 'paused_at',
  'version', 'connects', 'pause_mode')
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

function change.version(version, label)
  if tonumber(version) <= tonumber(run.version) then return false end
  call('HSET', M, 'version', version, 'label', label or '')
  return true
end

function change.pause(mode)
  if run.state == 'paused' and run.pause_mode ~= mode then
    call('HSET', M, 'pause_mode', mode)
    return true
  end
  if run.state ~= 'running' then return false end
  call('HSET', M, 'state', 'paused', 'paused_at', int(clock), 'pause_mode', mode)
  return true
end

function change.resume()
  if run.state ~= 'paused' then return false end
  local paused = tonumber(run.paused_total) + clock - tonumber(run.paused_at)
  call('HSET', M, 'state', 'running', 'paused_total', int(paused))
  ring('bell')
  return true
end

function change.set(budget, value)
  if call('HGET', M, budget) == value then return false end
  call('HSET', M, budget, value)
  return true
end

check_types('ctl bell')
local op = ARGV[1]
if not change[op] or (op == 'set' and not BUDGETS[ARGV[2]]) then return {'unknown'} end
if change[op](ARGV[2], ARGV[3]) then announce(op, ARGV[2]) end
return call('HMGET', M, 'state', 'version', 'control_seq', 'epoch', 'consumer', 'connects',
  'rewind_id')
