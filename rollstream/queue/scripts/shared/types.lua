-- types: a key of the run that is another program's is refused before anything is changed, because
-- a script that raises half-way keeps what it did so far.
-- Made only where it is asked for: most calls do not.
local types, checked = nil, {}
local function all_types()
  types = types or {q = 'zset', s = 'zset', d = 'zset', l = 'zset', age = 'zset', dl = 'zset',
                    gs = 'set', ge = 'set', full = 'stream', ready = 'stream', past = 'stream',
                    ctl = 'stream', bell = 'list', room = 'list', cur = 'string', c = 'hash',
                    w = 'zset', wp = 'zset', wa = 'zset', wl = 'hash', ws = 'hash', wh = 'hash',
                    vanished = 'hash'}
  return types
end

-- names: with spaces between them.
local function check_types(names)
  for name in string.gmatch(names, '%S+') do
    if not checked[name] then
      local kind, wanted = call('TYPE', K .. name).ok, all_types()[name]
      if kind ~= 'none' and kind ~= wanted then
        error('WRONGTYPE ' .. K .. name .. ' is a ' .. kind .. ' of another program, where this run '
          .. 'keeps a ' .. wanted .. ': remove it')
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
