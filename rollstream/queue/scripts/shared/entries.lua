-- entries: references to groups in `full` and `ready`.
local function remove_entry(stream, consumers, message)
  call('XACK', K .. stream, consumers, message)
  call('XDEL', K .. stream, message)
end
