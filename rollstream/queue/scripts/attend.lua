-- attend: the trainer says that it is there, whether it waits for groups that are not, or that it leaves.
-- argv: consumer connection wait_ms|here|left
-- keys: m HASH, d ZSET
-- group: -
-- member: -
-- answer: ok | taken | lost
-- repeat: the same answer; a wait is said once more, from now on
-- uses: clock
local consumer, connection, word = unpack(ARGV)
permit_full_memory()
local known = call('HMGET', M, 'state', 'consumer')
if not known[1] then return 'lost' end
if known[2] ~= consumer then return 'taken' end
-- A wait says until when it is believed: a trainer that was killed in it says nothing more.
local wait_ms = tonumber(word)
local said = wait_ms and int(now_ms() + wait_ms) or word
call('HSET', M, 'trainer', consumer .. ' ' .. connection .. ' ' .. said)
return 'ok'
