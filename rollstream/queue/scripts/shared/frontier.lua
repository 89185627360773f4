-- frontier: every id below `frontier` is terminal; bit j of `cur` says it of id `base` + j.
local MAX_OFFSET = 4294967295 -- of a bit in a Redis string
local REBASE_AFTER = 65536

local function is_terminal(id, frontier, base)
  if id < frontier then return true end
  local offset = id - base
  return offset <= MAX_OFFSET and call('GETBIT', K .. 'cur', int(offset)) == 1
end

-- The id becomes terminal, and the frontier moves over everything that is.
local function mark_terminal(gid)
  local id = tonumber(gid)
  if not id then return end
  local run = read(M, 'frontier', 'base')
  local frontier, base = tonumber(run.frontier), tonumber(run.base)
  if id < frontier or id - base > MAX_OFFSET then return end
  call('SETBIT', K .. 'cur', int(id - base), 1)
  if id ~= frontier then return end
  frontier = base + call('BITPOS', K .. 'cur', 0, math.floor((frontier - base) / 8))
  if frontier - base >= REBASE_AFTER then
    local cut = math.floor((frontier - base) / 8)
    local rest = call('GETRANGE', K .. 'cur', cut, -1)
    base = base + cut * 8
    if rest == '' then call('DEL', K .. 'cur') else call('SET', K .. 'cur', rest) end
  end
  call('HSET', M, 'frontier', int(frontier), 'base', int(base))
end
