-- staling: a training group is too old. It begins anew where the run says so, and as often as it
-- may; else it is dropped. Where it was found is counted, and by how many versions it was behind.
-- uses: renewing
-- gives: end_stale
local FOUND = {open = 'running', full = 'ready', ready = 'ready', delivered = 'hand_out'}
local DETAILS = {running = 'while it was running', ready = 'while it waited for the trainer',
                 hand_out = 'in the hands of the trainer'}

-- Returns its size (false where it is not live), and whether it begins anew.
local function end_stale(gid)
  local run = read(M, 'version', 'on_stale', 'max_requeues', 'max_stale')
  local g = group_key(gid)
  local row = read_group(g, 'state', 'n', 'full_id', 'ready_id', 'score', 'timeout_ms', 'prompt',
    'life', 'version', 'env')
  local place = FOUND[row.state]
  if not place then return false, false end
  -- Of a damaged one there is too little left to begin with.
  local life = row.score and row.timeout_ms and row.prompt and tonumber(row.life or '')
  local is_renewed = run.on_stale == 'requeue'
    and life and life < tonumber(run.max_requeues or 1)
  if is_renewed then
    renew(gid, g, row, 'stale')
    call('HINCRBY', K .. 'c', 'requeued:stale', 1)
  elseif not end_group(gid, 'dropped', 'stale', DETAILS[place] .. ': first leased at version '
      .. (row.version or '?') .. ', now it is ' .. run.version .. ' (weights.max_staleness '
      .. (run.max_stale or '?') .. ')') then
    return false, false
  end
  local version = tonumber(run.version)
  local age = math.max(0, version - (tonumber(row.version or '') or version))
  call('HINCRBY', K .. 'c', 'stale:' .. place, 1)
  call('HINCRBY', K .. 'c', 'stale_age:' .. place, int(age))
  return tonumber(row.n), is_renewed
end
