-- queueing: all members of a new life of a group wait for leases.
-- uses: wake
local QUEUE_CHUNK = 1024 -- Lua unpacks at most some thousands of values

local function queue_members(gid, n, score)
  for first = 0, n - 1, QUEUE_CHUNK do
    local members = {}
    for i = first, math.min(first + QUEUE_CHUNK, n) - 1 do
      members[#members + 1] = score
      members[#members + 1] = gid .. ':' .. i
    end
    call('ZADD', K .. 'q', unpack(members))
  end
  ring('bell')
end
