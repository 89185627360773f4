-- retire: the trainer gives a group up (stale or seen when it was about to train on it).
-- argv: consumer gid reason
-- keys: m HASH, g:<gid> HASH, b:<gid> HASH, ready STREAM, full STREAM, gs SET, ge SET, q ZSET, s ZSET, d ZSET, l ZSET, age ZSET, dl ZSET, cur STRING, c HASH, past STREAM, room LIST, vanished HASH
-- group: dropped
-- member: group_ended
-- answer: taken | dropped | gone (or not in the trainer's hands)
-- repeat: gone
-- uses: ending
permit_full_memory()
if call('HGET', M, 'consumer') ~= ARGV[1] then return 'taken' end
-- Only the life that it was given: one that was requeued since is not what the trainer judged.
if group_values(group_key(ARGV[2]), 'state')[1] ~= 'delivered' then return 'gone' end
return end_group(ARGV[2], 'dropped', ARGV[3], 'by the trainer') and 'dropped' or 'gone'
