-- ids: how members and leases are named in q, s, d and l. A group's id may have colons of its own.
local function split_member(id) return string.match(id, '^(.*):(%d+)$') end
local function split_lease(id) return string.match(id, '^(.*):(%d+):([^:]*)$') end
