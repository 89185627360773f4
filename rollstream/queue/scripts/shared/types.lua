-- types: a key of the run that is another program's is refused before anything is changed, because
-- a script that raises half-way keeps what it did so far.
-- Asked by length, not by TYPE: a number is the cheapest answer. One text, because a table would be
-- made anew by every call.
local LENGTHS = ' q=ZCARD s=ZCARD d=ZCARD l=ZCARD age=ZCARD dl=ZCARD gs=SCARD ge=SCARD full=XLEN \
 ready=XLEN eval=XLEN past=XLEN ctl=XLEN bell=LLEN room=LLEN cur=STRLEN c=HLEN w=ZCARD \
 wp=ZCARD wa=ZCARD wl=HLEN ws=HLEN wh=HLEN wc=HLEN wb=HLEN lb=HLEN vanished=HLEN'
local checked = {}
local FAILING = 'full eval dl c' -- what a member that fails for good may change, beside where it waits

-- names: with spaces between them.
local function check_types(names)
  for name in string.gmatch(names, '%S+') do
    if not checked[name] then
      local command = string.match(LENGTHS, ' ' .. name .. '=(%u+)')
      if type(redis.pcall(command, K .. name)) == 'table' then
        local wanted = {ZCARD = 'zset', SCARD = 'set', XLEN = 'stream', LLEN = 'list',
                        STRLEN = 'string', HLEN = 'hash'}
        error('WRONGTYPE ' .. K .. name .. ' is a ' .. call('TYPE', K .. name).ok
          .. ' of another program, where this run keeps a ' .. wanted[command] .. ': remove it')
      end
      checked[name] = true
    end
  end
end

-- What a script answers that undid its changes.
local function failure(problem)
  if type(problem) == 'table' then return problem end
  return redis.error_reply(tostring(problem))
end
