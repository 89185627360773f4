-- deliver: the trainer takes groups in hand; staleness is judged once more.
-- argv: consumer gid*
-- keys: m HASH, g:<gid> HASH, b:<gid> HASH, ready STREAM, eval STREAM, full STREAM, gs SET, ge SET, q ZSET, s ZSET, d ZSET, l ZSET, age ZSET, dl ZSET, cur STRING, c HASH, past STREAM, room LIST, bell LIST, vanished HASH
-- group: handed_out dropped requeued
-- member: group_ended requeued
-- answer: taken | per group: ok | stale (dropped here, or it begins anew) | gone
-- repeat: the same answers (gone for what was stale), nothing is written
-- uses: groups
-- lazily: staling
permit_full_memory()
local run = read(M, 'consumer', 'version', 'max_stale', 'on_stale')
if run.consumer ~= ARGV[1] then return {'taken'} end
local answer, max_stale = {}, tonumber(run.max_stale or -1)
if run.on_stale == 'deliver' then max_stale = -1 end

local function hand_out(gid)
  local g = group_key(gid)
  local row = read_group(g, 'state', 'version')
  if row.state ~= 'ready' and row.state ~= 'delivered' then return 'gone' end
  local version, evaluation = tonumber(run.version), is_evaluation(gid)
  if max_stale >= 0 and not evaluation
    and version - tonumber(row.version or version) > max_stale then
    end_stale(gid)
    return 'stale'
  end
  if row.state == 'ready' then
    call('ZREM', K .. 'age', gid)
    call('HSET', g, 'state', 'delivered')
    -- Told apart from the live training groups: that is how a trainer knows that nothing is left.
    if not evaluation then call('HINCRBY', M, 'delivered', 1) end
  end
  return 'ok'
end

for j = 2, #ARGV do answer[#answer + 1] = hand_out(ARGV[j]) end
return answer
