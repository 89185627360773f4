-- wake: one token in `bell` (work arrived) or `room` (capacity came free). Never more than one, so
-- the lists stay bounded; a token that is lost costs its waiter half a second.
local function ring(list)
  if call('LLEN', K .. list) == 0 then call('LPUSH', K .. list, 1) end
end
