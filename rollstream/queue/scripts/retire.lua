-- retire: the trainer gives a group up (stale or seen when it was about to train on it).
-- argv: consumer gid reason
-- keys: m HASH, g:<gid> HASH, b:<gid> HASH, ready STREAM, full STREAM, gs SET, ge SET, q ZSET, s ZSET, d ZSET, l ZSET, age ZSET, dl ZSET, cur STRING, c HASH, past STREAM, room LIST
-- group: dropped
-- member: group_ended
-- answer: taken | dropped | gone
-- repeat: gone
-- uses: ending
permit_full_memory()
if call('HGET', M, 'consumer') ~= ARGV[1] then return 'taken' end
return end_group(ARGV[2], 'dropped', ARGV[3], 'by the trainer') and 'dropped' or 'gone'
