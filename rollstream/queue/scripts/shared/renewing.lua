-- renewing: a live group begins anew under its id, in its old place: budgets, deadline, version and
-- results are new, and whoever runs its members is fenced.
-- uses: clock ending queueing

-- row: of `read_group`, with every field that is named here.
local function renew(gid, g, row, reason)
  check_types('bell' .. PLACES)
  take_out_group(gid, g, row)
  call('UNLINK', g, body_key(gid))
  call('HSET', g, 'n', row.n, 'left', row.n, 'state', 'open', 'score', row.score,
    'timeout_ms', row.timeout_ms, 'prompt', row.prompt, 'life', int(tonumber(row.life) + 1),
    'requeue_reason', reason, 'since', int(now_ms()), 'env', row.env or '')
  call('HINCRBY', K .. 'c', (is_evaluation(gid) and 'e.' or '') .. 'requeued', 1)
  queue_members(gid, tonumber(row.n), row.score)
end
