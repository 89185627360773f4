-- damage: the hash of a live group vanished (evicted, or deleted by hand). Whoever meets what is
-- left of it says so here, and `sweep` walks over everything (`looking`) before it ends the group.
local is_walk_new = false -- the walk begins anew, so no page of this call may move it on

local function begin_walk()
  call('HSET', M, 'cursor', 'gs 0')
  is_walk_new = true
end

-- The group was met: whether it had been handed out is the walk's to find out.
local function walk_to(gid)
  if call('HEXISTS', K .. 'vanished', gid) == 0 then begin_walk() end
end

-- A member of the group was met, so nobody had it in hand. One that is known already is taken out
-- by the walk under way.
local function met_vanished(gid)
  local set = gid and is_evaluation(gid) and 'ge' or 'gs'
  if not gid or call('SISMEMBER', K .. set, gid) == 0 then return end -- written by somebody else
  if call('HSETNX', K .. 'vanished', gid, 'open') == 1 then begin_walk() end
end
