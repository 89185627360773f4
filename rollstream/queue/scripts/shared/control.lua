-- control: a change of the run that every process must hear of: `control_seq` rises and `ctl` says it.
local function announce(op, argument)
  call('HINCRBY', M, 'control_seq', 1)
  call('XADD', K .. 'ctl', 'MAXLEN', '~', 64, '*', 'op', op, 'arg', argument or '')
end
