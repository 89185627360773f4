-- retire: the trainer gives a group up (stale or seen when it was about to train on it).
-- argv: consumer gid reason
-- keys: m HASH, g:<gid> HASH, b:<gid> HASH, ready STREAM, eval STREAM, full STREAM, gs SET, ge SET, q ZSET, s ZSET, d ZSET, l ZSET, age ZSET, dl ZSET, cur STRING, c HASH, past STREAM, room LIST, bell LIST, vanished HASH
-- group: dropped requeued
-- member: group_ended requeued
-- answer: taken | dropped | requeued (as stale, where the run says so) | gone (or not in the trainer's hands)
-- repeat: gone
-- uses: ending
-- lazily: staling
permit_full_memory()
if call('HGET', M, 'consumer') ~= ARGV[1] then return 'taken' end
-- Only the life that it was given: one that was requeued since is not what the trainer judged.
if group_values(group_key(ARGV[2]), 'state')[1] ~= 'delivered' then return 'gone' end
if ARGV[3] == 'stale' and not is_evaluation(ARGV[2]) then
  local size, is_renewed = end_stale(ARGV[2])
  return is_renewed and 'requeued' or size and 'dropped' or 'gone'
end
return end_group(ARGV[2], 'dropped', ARGV[3], 'by the trainer') and 'dropped' or 'gone'
