"""The mutations: each takes one rule out of the scripts.

Owns the list. A change names a script or `*` (every script that has the text); it must fit, so a
script that is written anew takes its mutations with it. Invariant: names are unique.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollstream.queue.scripts import Script, make_script


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of the scripts."""

    name: str
    where: str
    old: str
    new: str = ""
    equivalent: str = ""
    """Why nothing can notice it; empty: something must."""


def mutate(scripts: Mapping[str, Script], mutation: Mutation) -> dict[str, Script]:
    """Return the scripts with one change.

    Raises:
        AssertionError: it fits none of them.
    """
    changed = {
        name: make_script(name, script.source.replace(mutation.old, mutation.new))
        if mutation.where in ("*", name) and mutation.old in script.source
        else script
        for name, script in scripts.items()
    }
    assert any(changed[name] is not scripts[name] for name in scripts), mutation.name
    return changed


M = Mutation
_LEASED = "call('ZREM', K .. 'l', gid .. ':' .. i .. ':' .. token)"
_UNKNOWN = "if call('HGET', M, 'consumer') ~= ARGV[1] then return"
_OTHERS = "if run.consumer ~= ARGV[1] then return {'taken'} end"
_DUE = "local due = call('ZRANGEBYSCORE', K .. 'd', '-inf', "
_CHARGE = "call('HINCRBY', g, 'a' .. i, 1)"

MUTATIONS = [
    # --- the fences ---
    M("a token without its call number", "lease", "'-' .. call_no .. '-'", "'-'"),
    M("verdict not fenced by its message", "verdict", " or row.full_id ~= message then", " then"),
    M("verdict not fenced at all", "verdict",
      "if row.state ~= 'full' or row.full_id ~= message then", "if false then"),
    M("requeue not fenced by life", "requeue", "if row.life ~= life then return 'other' end"),
    M("complete without a lease", "complete", "call('ZREM', K .. 'l', lease_id) == 0",
      "call('ZREM', K .. 'l', lease_id) == 7"),
    M("complete keeps the lease", "complete", "call('ZREM', K .. 'l', lease_id) == 0",
      "not call('ZSCORE', K .. 'l', lease_id)"),
    M("a member ends as often as it is leased", "complete", " or row[5] then return",
      " then return",
      equivalent="a member with an end is in no set, so nobody leases it again"),
    M("every late result is a dup", "complete", "'dup' or 'fenced'", "'dup' or 'dup'"),
    M("fail without a lease", "fail", f"{_LEASED} == 0", f"{_LEASED} == 7"),
    M("park without a lease", "park", f"{_LEASED} == 0", f"{_LEASED} == 7"),
    M("ack not fenced by the consumer", "ack", _UNKNOWN, "if false then return"),
    M("retire not fenced by the consumer", "retire", _UNKNOWN, "if false then return"),
    M("deliver not fenced by the consumer", "deliver", _OTHERS),
    M("rewind not fenced by the consumer", "rewind",
      "if run.consumer ~= consumer then return {'taken'} end"),
    M("connect with an equal number takes over", "control",
      "tonumber(number) <= tonumber(run.connects)", "tonumber(number) < tonumber(run.connects)"),
    M("an older connect takes over", "control",
      "tonumber(number) <= tonumber(run.connects)", "number == run.connects"),
    M("the version goes back", "control", "tonumber(version) <= tonumber(run.version)", "false"),
    M("a repeated rewind rewinds again", "rewind", "if run.rewind_id == rewind_id then",
      "if false then"),
    M("done of an older epoch counts", "end", "if run.epoch ~= argument then return 'epoch' end"),
    M("another source is let in", "open", "or run.fingerprint ~= fingerprint)", ")"),
    # --- what may be enqueued ---
    M("enqueue takes terminal ids", "enqueue",
      "if is_terminal(id, frontier, tonumber(run.base)) then return {'done'} end"),
    M("the bitmap is not read", "*",
      "return offset <= MAX_OFFSET and call('GETBIT', K .. 'cur', int(offset)) == 1",
      "return false"),
    M("enqueue knows no window", "enqueue", "if id >= frontier + tonumber(run.W)", "if false"),
    M("enqueue knows no capacity", "enqueue",
      "call('SCARD', K .. 'gs') >= tonumber(run.cap)", "false"),
    M("capacity off by one", "enqueue",
      "call('SCARD', K .. 'gs') >= tonumber", "call('SCARD', K .. 'gs') > tonumber"),
    M("enqueue in every state", "enqueue", "if run.state ~= 'running' and run.state ~= 'paused'",
      "if not run.state"),
    M("evaluations run like training", "enqueue", "tonumber(priority) * PRIORITY_STEP",
      "math.max(0, tonumber(priority)) * PRIORITY_STEP"),
    M("priority is not kept", "enqueue", "tonumber(priority) * PRIORITY_STEP", "0"),
    M("members are queued but one", "*", "for i = first, math.min(first + QUEUE_CHUNK, n) - 1 do\n"
      "      members", "for i = first + 1, math.min(first + QUEUE_CHUNK, n) - 1 do\n      members"),
    # --- leases ---
    M("lease remembers no call", "lease", "if not repeated and #ids > 0 then", "if false then"),
    M("an old call is a new one", "lease", "if call_no < tonumber(last) then return {'old'} end"),
    M("leases go on in a pause", "lease", "if not repeated and run.state ~= 'running' then",
      "if false then"),
    M("a repeat answers what is lost, too", "lease",
      "(not repeated or call('ZSCORE', K .. 'l', lease_id))", "true"),
    M("fair shares are not kept", "lease", "math.max(FAIR_SHARE, share)", "MAX_LEASE"),
    M("a lease of any size", "lease", "local MAX_LEASE = 256", "local MAX_LEASE = 99999"),
    M("a lease of prompts of any size", "lease", "if prompt_bytes > MAX_PROMPT_BYTES", "if false"),
    M("what a lease gives back is remembered", "lease", "ids[place], is_suspect[id] = '-', nil",
      "is_suspect[id] = nil",
      equivalent="a repeat finds no lease of it, and reads more prompts than it has to"),
    M("a lease gives suspects back as others", "lease", "(is_suspect[id] and 's' or 'q'), score",
      "'q', score"),
    M("a lease gives back and rings nobody", "lease", "if #gids > 0 then ring('bell') end"),
    M("a lease gives back to another place", "lease", "popped[2 * (place - num_suspects)]",
      "popped[2 * place]"),
    M("a lease rings nobody", "lease", "if queued > want then ring('bell') end"),
    M("the deadline begins with every lease", "lease", "deadline = deadline or first_lease(",
      "deadline = first_lease("),
    M("deadlines run on in a pause", "lease", "run_clock + timeout_ms", "clock + timeout_ms"),
    M("a group past its deadline is leased", "lease", "if deadline > 0 and deadline <= run_clock",
      "if false"),
    M("no deadline is indexed", "lease",
      "if deadline > 0 then call('ZADD', K .. 'dl', int(deadline), gid) end"),
    M("no version is indexed", "lease",
      "if not is_evaluation(gid) then call('ZADD', K .. 'age', run.version, gid) end"),
    M("beat extends nothing", "beat", "if #extended > 0 then", "if false then"),
    M("beat extends by nothing", "beat", "int(clock + tonumber(run.lease_ms))", "int(clock)"),
    M("beat says nothing is lost", "beat", "answer[#answer + 1] = ARGV[j]"),
    M("beat without XX", "beat", "'XX', unpack(extended)", "unpack(extended)",
      equivalent="only ids whose score was read in the same script are extended"),
    M("a beat is no sign of life", "beat", "call('ZADD', K .. 'w', int(clock), ARGV[1])"),
    # --- poison ---
    M("suspects go to q", "*", "(suspect and 's' or 'q')", "'q'"),
    M("everybody is a suspect", "*", "local SUSPECT_CRASHES = 2", "local SUSPECT_CRASHES = 1"),
    M("any number of suspects a worker", "lease", "local MAX_SUSPECTS = 8",
      "local MAX_SUSPECTS = 99"),
    M("suspects of three crashes share", "lease",
      "if gid and crashes_of(gid, i) >= ALONE_CRASHES then", "if false then"),
    M("who runs alone gets company", "lease",
      "if crashes_of(split_lease(lease_id)) >= ALONE_CRASHES then alone = true end"),
    M("held suspects are forgotten", "lease", "if next(is_suspect) then", "if false then"),
    M("a crash is not charged", "sweep", "call('HINCRBY', g, 'x' .. i, 1)",
      "tonumber(call('HGET', g, 'x' .. i) or 0)"),
    M("one crash more", "sweep", "crashes >= tonumber(run.max_crashes)",
      "crashes > tonumber(run.max_crashes)"),
    # --- budgets ---
    M("a give-back is charged", "fail", "if kind == 'back' then",
      f"if kind == 'back' then {_CHARGE}"),
    M("park is charged", "park", "send_back(gid, g, i)", f"{_CHARGE} send_back(gid, g, i)"),
    M("a retry is free", "fail", _CHARGE, "tonumber(call('HGET', g, 'a' .. i) or 0)"),
    M("one attempt more", "fail", "attempts >= tonumber(run.max_attempts)",
      "attempts > tonumber(run.max_attempts)"),
    M("final is tried again", "fail", "kind == 'final' or "),
    M("back-off is not kept", "fail", "delay > 0 and clock_of(run) + delay or nil", "nil"),
    M("delayed members stay delayed", "*", f"{_DUE}int(clock)", f"{_DUE}'-inf'"),
    M("delayed members come too early", "*", f"{_DUE}int(clock)", f"{_DUE}'+inf'"),
    M("a promoted member stays delayed", "*", "call('ZREM', K .. 'd', id)"),
    # --- results ---
    M("too large is accepted", "complete", "if size > max_bytes then", "if false then"),
    M("the limit itself is too large", "complete", "if size > max_bytes then",
      "if size >= max_bytes then"),
    M("too large may be parked", "park", "if #body > max_bytes then", "if false then"),
    M("members left are not counted", "complete", "tonumber(row[2]) - 1", "tonumber(row[2])"),
    M("the last member makes nothing full", "complete", "if left == 0 then", "if false then"),
    M("failed members are not counted", "*", "call('HINCRBY', g, 'failed', #members)"),
    M("why is the last reason", "*", "call('HSETNX', g, 'why', reason)",
      "call('HSET', g, 'why', reason)"),
    M("a failed member keeps what it parked", "*",
      "if call('HDEL', g, unpack(flags)) > 0 then", "if false then"),
    M("a done member keeps what it parked", "complete", "if row[3] then", "if false then"),
    M("a parked size is wrong", "park", "'k' .. i, #body,", "'k' .. i, #body + 1,"),
    M("a parked body is not kept", "park", "call('HSET', body_key(gid), 'p' .. i, body)"),
    M("texts are not kept", "complete", "i, body, 'x' .. i, text)", "i, body)"),
    # --- time ---
    M("no grace after an outage", "sweep", "local in_grace = clock < grace_until",
      "local in_grace = false"),
    M("an outage is not noticed", "sweep", "local grace_until = jumped and clock + lease_ms or",
      "local grace_until ="),
    M("the clock runs through outages", "*", "math.max(0, math.min(step, half))",
      "math.max(0, step)"),
    M("the clock goes back", "*", "math.max(0, math.min(step, half))", "math.min(step, half)"),
    M("a jump back is no outage", "*", "step < 0 or step > half", "step > half"),
    M("a pause does not stop the run clock", "*",
      "run.state == 'paused' and tonumber(run.paused_at) or clock", "clock"),
    M("resume forgets the pause", "control",
      "tonumber(run.paused_total) + clock - tonumber(run.paused_at)", "tonumber(run.paused_total)"),
    M("an expired lease stays", "sweep", "call('ZREM', K .. 'l', lease_id)"),
    M("leases expire in pages of any size", "sweep",
      "local due = call('ZRANGEBYSCORE', K .. 'l', '-inf', int(clock), 'LIMIT', 0, page)",
      "local due = call('ZRANGEBYSCORE', K .. 'l', '-inf', int(clock))"),
    M("sweep says nothing is left", "sweep", "if count >= size then more = 1 end"),
    M("deadlines end nobody", "sweep", "fail_members(gid, g, members, 'deadline'",
      "fail_members(gid, g, {}, 'deadline'"),
    M("deadlines end those who ran only", "sweep", "if not final then\n      members",
      "if not final and token then\n      members"),
    M("a deadline leaves members where they are", "sweep",
      "if left > 0 then left = left - call('ZREM', K .. set, unpack(waiting)) end"),
    M("a full group keeps its deadline", "*",
      "call('ZREM', K .. 'dl', gid) -- only an open group has a deadline"),
    M("workers are forgotten at once", "sweep", "local FORGET_LEASES = 4",
      "local FORGET_LEASES = 1"),
    M("absent workers keep their record", "sweep", "call('HDEL', K .. 'wl', name)"),
    # --- staleness, delivery ---
    M("stale one version too early", "sweep", "'(' .. oldest", "oldest"),
    M("stale groups run on", "sweep", "if max_stale < 0 then return 0 end", "do return 0 end"),
    M("stale groups are handed out", "deliver", "> max_stale then", "> 99 then"),
    M("fresh groups are stale", "deliver", "> max_stale then", ">= max_stale then"),
    M("delivered groups stay in age", "deliver", "call('ZREM', K .. 'age', gid)"),
    M("delivered groups are not marked", "deliver", "call('HSET', g, 'state', 'delivered')"),
    M("a full group is handed out", "deliver", "if row.state ~= 'ready' and",
      "if row.state ~= 'full' and row.state ~= 'ready' and"),
    M("verdict writes no headers", "verdict",
      "for j = 6, #ARGV, 2 do call('HSET', g, 'h' .. ARGV[j], ARGV[j + 1]) end"),
    M("a kept group keeps its entry in full", "verdict",
      "pcall(remove_entry, 'full', 'aggregators', message)", "true"),
    M("a late verdict leaves its entry", "verdict",
      "remove_entry('full', 'aggregators', message)\n  return 'noop'", "return 'noop'"),
    # --- ends ---
    M("an end leaves leases", "*",
      "if #leased > 0 then left = left - call('ZREM', K .. 'l', unpack(leased)) end"),
    M("an end leaves queued members", "*", "ipairs({'q', 's', 'd'})", "ipairs({'s', 'd'})"),
    M("an end leaves suspects", "*", "ipairs({'q', 's', 'd'})", "ipairs({'q', 'd'})"),
    M("an end leaves delayed members", "*", "ipairs({'q', 's', 'd'})", "ipairs({'q', 's'})"),
    M("an end leaves pending entries", "*", "call('XACK', K .. stream, consumers, message)"),
    M("an end leaves entries", "*", "call('XDEL', K .. stream, message)"),
    M("an end leaves bodies", "ack", "call('UNLINK', g, body_key(gid))", "call('UNLINK', g)"),
    M("a drop is not terminal", "*", "if not keep_id then mark_terminal(gid) end",
      "if outcome == 'acked' then mark_terminal(gid) end"),
    M("an ack is not terminal", "*", "if not keep_id then mark_terminal(gid) end",
      "if not keep_id and outcome ~= 'acked' then mark_terminal(gid) end"),
    M("an aborted group is terminal", "sweep", "'run_aborted', '', true", "'run_aborted', ''"),
    M("an end frees no room", "*", "ring('room')\n", "\n"),
    M("an end leaves age", "*", "call('ZREM', K .. 'age', gid)"),
    M("a drop's record has no errors", "*", "ipairs({'h', 'e'})", "ipairs({'h'})"),
    M("ack ends delivered groups only", "ack", "if end_group(gid, 'acked', ",
      "if row.state == 'delivered' and end_group(gid, 'acked', "),
    M("ack of a forgotten group is nothing", "ack",
      "mark_terminal(gid)\n  return 'lost'", "return 'lost'"),
    M("withdraw takes what the trainer holds", "withdraw",
      "== 'delivered' then return 'held' end", "== '' then return 'held' end"),
    M("a skipped row is not terminal", "withdraw", "mark_terminal(gid)\nreturn", "return"),
    M("retire ends what was requeued", "retire",
      "~= 'delivered' then return 'gone' end", "== '' then return 'gone' end"),
    M("an aborted run never ends", "sweep", "call('HSET', M, 'state', 'ended')"),
    M("an aborted run drops nothing", "sweep", "if run.state ~= 'aborting' then return 0 end",
      "do return 0 end"),
    # --- requeue ---
    M("any number of requeues", "requeue", "tonumber(life) >= tonumber(run.max_requeues or 1)",
      "false"),
    M("requeue leaves what ran", "requeue", "take_out_group(gid, g, row)"),
    M("requeue keeps results", "requeue", "call('UNLINK', g, body_key(gid))", "call('UNLINK', g)"),
    M("requeue keeps budgets", "requeue", "call('UNLINK', g, body_key(gid))",
      "call('UNLINK', body_key(gid))"),
    M("requeue in the same life", "requeue", "int(tonumber(life) + 1)", "life"),
    M("requeue at the end of the queue", "requeue",
      "tonumber(row.n), row.score)", "tonumber(row.n), row.score + 1000)"),
    # --- records that vanished ---
    M("a vanished group stays live", "sweep", "end_vanished(gid, 'its record vanished', true)"),
    M("a vanished group is terminal", "sweep", "'withdrawn', detail, true, no_traces",
      "'withdrawn', detail, false, no_traces"),
    M("a vanished group is not enqueued again", "sweep", "if scan_again then", "if false then"),
    M("a vanished group leaves its members", "sweep", "call('ZREM', K .. set, id)\n"),
    M("a vanished group stays delivered", "sweep", "was_delivered(gid) and 'delivered' or 'open'",
      "'open'"),
    M("enqueue over a vanished group", "enqueue",
      "if added == 0 then", "if added == 7 then"),
    M("enqueue over a live group takes a place", "enqueue", "if added == 0 then",
      "if added == 0 then call('HINCRBY', M, 'seq', 1)"),
    # --- frontier and rewind ---
    M("the frontier goes one too far", "*",
      "frontier = base + call('BITPOS', K .. 'cur', 0, math.floor((frontier - base) / 8))",
      "frontier = base + call('BITPOS', K .. 'cur', 0, math.floor((frontier - base) / 8)) + 1"),
    M("the frontier stands still", "*", "if id ~= frontier then return end", "do return end"),
    M("a rebase forgets the rest", "*", "local rest = call('GETRANGE', K .. 'cur', cut, -1)",
      "local rest = ''"),
    M("a rebase goes astray", "*", "base = base + cut * 8", "base = base + cut * 8 + 8"),
    M("state begins with the base", "state", "'cur', skip, -1", "'cur', 0, -1"),
    M("rewind leaves seen groups", "rewind", "if is_terminal(id, frontier, base) then",
      "if false then"),
    M("rewind leaves groups beyond", "rewind", "elseif id >= window_end then", "elseif false then"),
    M("rewind makes what lies beyond terminal", "rewind",
      "'beyond the window after a rewind', true", "'beyond the window after a rewind'"),
    M("rewind keeps done", "rewind", ", 'done', 0)", ")"),
    M("rewind keeps the epoch", "rewind", "call('HINCRBY', M, 'epoch', 1)", "tonumber(run.epoch)"),
    M("rewind keeps what was terminal", "rewind", "call('DEL', K .. 'cur')"),
    M("rewind forgets the bitmap", "rewind",
      "if bitmap ~= '' then call('SET', K .. 'cur', bitmap) end"),
    M("rewind leaves holes below", "rewind",
      "for offset = 0, frontier - base - 1 do call('SETBIT', K .. 'cur', offset, 1) end"),
    # --- counters, words, memory ---
    M("enqueued is not counted", "enqueue",
      "call('HINCRBY', K .. 'c', counter, 1)\n"),
    M("ends are not counted", "*",
      "call('HINCRBY', K .. 'c', (evaluation and 'e.' or '') .. counter, 1)"),
    M("drops are counted as stale", "*", "'dropped:' .. reason", "'dropped:stale'"),
    M("completed is not counted", "complete", "if completed > 0 then", "if false then"),
    M("fenced is not counted", "complete", "if fenced > 0 then", "if false then"),
    M("give-backs are not counted", "fail", "call('HINCRBY', K .. 'c', 'given_back', 1)"),
    M("attempts are not counted", "fail", "call('HINCRBY', K .. 'c', 'attempts', 1)"),
    M("crashes are not counted", "sweep", "if expired > 0 then", "if false then"),
    M("failures are not counted", "*",
      "call('HINCRBY', K .. 'c', 'member_failed:' .. reason, #members)"),
    M("skipped is not counted", "withdraw", "call('HINCRBY', K .. 'c', 'skipped', 1)"),
    M("reacked is not counted", "ack", "call('HINCRBY', K .. 'c', 'reacked', 1)"),
    M("parked is not counted", "park", "call('HINCRBY', K .. 'c', 'parked', 1)"),
    M("requeued is not counted", "requeue",
      "call('HINCRBY', K .. 'c', (is_evaluation(gid) and 'e.' or '') .. 'requeued', 1)"),
    M("delivered is not counted", "deliver", "call('HINCRBY', M, 'delivered', 1)"),
    M("delivered never falls", "*", "call('HINCRBY', M, 'delivered', -1)"),
    M("changes are told to nobody", "*", "call('HINCRBY', M, 'control_seq', 1)"),
    M("full memory refuses everything", "*", "call('ZREM', K .. 'd', '') end", "end"),
    M("full memory is an error for enqueue", "enqueue",
      "if string.find(tostring(added.err), 'OOM', 1, true) then", "if false then"),
]  # fmt: skip
