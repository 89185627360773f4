-- streak: groups in a row that verdicts dropped, by reason, none kept between them. As many as
-- `max_drops` (0 is never) end the run as failed: its trainer would wait for ever.
-- uses: wake control
-- gives: count_drop
local TO_DO = '. Nothing reaches the trainer: look at the rewards, at how hard the prompts are and '
  .. 'at the filters, or raise aggregator.stop_after_dropped_batches (0 is never)'

-- The caller checked `ctl` and `bell`.
local function count_drop(gid, reason, detail)
  local run = read(M, 'state', 'streak', 'max_drops')
  local total, counts, texts, is_known = 1, {}, {}, false
  for name, count in string.gmatch(run.streak or '', '(%S+)=(%d+)') do
    count = tonumber(count)
    total = total + count
    if name == reason then count, is_known = count + 1, true end
    counts[#counts + 1] = name .. '=' .. int(count)
    texts[#texts + 1] = name .. ' ' .. int(count)
  end
  if not is_known then
    counts[#counts + 1] = reason .. '=1'
    texts[#texts + 1] = reason .. ' 1'
  end
  call('HSET', M, 'streak', table.concat(counts, ' '))
  local most = tonumber(run.max_drops or 0)
  if most == 0 or total < most or (run.state ~= 'running' and run.state ~= 'paused') then return end
  call('HSET', M, 'state', 'failed', 'error', int(total)
    .. (total == 1 and ' group was' or ' groups in a row were') .. ' dropped and none kept: ' .. table.concat(texts, ', ') .. '; the last was group ' .. gid .. ' (' .. reason
    .. ': ' .. detail .. ')' .. TO_DO)
  announce('fail', 'dropped')
  ring('bell')
end
