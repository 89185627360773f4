-- entries: references to groups in `full`, `ready` and `eval`, which is read by no consumer group.
local function remove_entry(stream, consumers, message)
  if consumers then call('XACK', K .. stream, consumers, message) end
  call('XDEL', K .. stream, message)
end
