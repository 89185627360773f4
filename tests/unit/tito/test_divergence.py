"""Rewritten histories one by one (170 and public reports), and what following them costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from rollstream.errors import MergeFault, Status
from rollstream.sample import Sample
from tests.toy import A1, A1_LOG_PROBS, A2, A2_LOG_PROBS, O1, P0, U1
from worker.tito import ids as ids_module
from worker.tito import replay
from worker.tito.divergence import Resolved, resolve
from worker.tito.ids import as_ids
from worker.tito.merge import TurnRecord
from worker.tito.prefix_tree import PrefixTree
from worker.types import DivergencePolicy, Replay

FORK, KEEP, REJECT = (
    DivergencePolicy.FORK, DivergencePolicy.KEEP_PREFIX, DivergencePolicy.REJECT,
)  # fmt: skip


def turn(prompt: Any, output: Any, log_probs: Any = None) -> TurnRecord:
    given = [-(i + 1) / 64 for i in range(len(output))] if log_probs is None else log_probs
    return TurnRecord(as_ids(prompt), as_ids(output), np.array(given, np.float32))


def samples(resolved: Resolved) -> list[Sample]:
    return [one.sample for one in resolved.merged if one.sample is not None]


def dropped(resolved: Resolved) -> list[tuple[int, int, int]]:
    return [(one.turn, one.index, one.dropped_tokens) for one in resolved.divergences]


def masks(sample: Sample) -> list[int]:
    assert sample.loss_mask is not None
    plain: list[int] = sample.loss_mask.tolist()
    return plain


BASE = [turn(P0, A1, A1_LOG_PROBS), turn(P0 + A1 + O1, A2, A2_LOG_PROBS)]


@pytest.mark.parametrize("policy", list(DivergencePolicy))
def test_an_append_only_history_is_the_same_under_every_policy(policy: DivergencePolicy) -> None:
    result = resolve(BASE, policy)
    (sample,) = samples(result)
    assert sample.tokens.tolist() == P0 + A1 + O1 + A2
    assert masks(sample) == [1, 1, 1] + [0] * 11 + [1, 1]
    assert (result.divergences, result.left_out, sample.metadata) == ([], 0, {})


# --- 170: drift, where slime masks by a threshold -------------------------------------------------
def test_170_drift_in_the_prompt_forks_into_two_samples() -> None:
    history = [*BASE, turn([9, *P0[1:], *A1, *O1], A2)]
    result = resolve(history, FORK)
    assert [one.tokens.tolist()[0] for one in samples(result)] == [1, 9]
    assert dropped(result) == [(2, 0, 0)]
    (kept,) = samples(resolve(history, KEEP))
    assert (kept.tokens.tolist()[0], masks(kept)) == (9, [1, 1])
    assert dropped(resolve(history, KEEP)) == [(2, 0, len(A1 + A2))]


def test_170_small_drift_in_the_last_reply_is_never_masked_by_a_threshold() -> None:
    # One of three sampled ids differs. slime keeps one sample with that span masked, and trains
    # what was sampled behind it after another context; here it forks, or ends at the difference.
    drifted = [1, 1, 1]
    history = [turn(P0, [31, 32, 30, 2]), turn([*P0, 31, 32, 33, 2, *drifted], A2)]
    assert [len(one.calls) for one in samples(resolve(history, FORK))] == [1, 1]
    result = resolve(history, KEEP)
    (kept,) = samples(result)
    assert masks(kept) == [1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert dropped(result) == [(1, len(P0) + 2, 2)]


def test_170_drift_in_an_earlier_turn_forks_and_keep_prefix_keeps_what_is_before_it() -> None:
    # The client cut the first reply, and only with the third request.
    rewritten = [*P0, 31, 2, *O1, *A2, *U1]
    history = [*BASE, turn(rewritten, [31, 2])]
    assert [len(one.calls) for one in samples(resolve(history, FORK))] == [2, 1]
    result = resolve(history, KEEP)
    (kept,) = samples(result)
    assert kept.tokens.tolist() == [*rewritten, 31, 2]
    assert [(call.start, call.end) for call in kept.calls] == [(10, 11), (36, 38)]
    assert kept.rollout_log_probs is not None
    assert np.flatnonzero(kept.rollout_log_probs).tolist() == [0, 26, 27]
    # Of turn 0 two ids are lost; of turn 1 all: A2 is there, but after another context.
    assert dropped(result) == [(2, 11, 4)]


def test_170_reading_records_twice_gives_the_same_twice() -> None:
    history = [*BASE, turn([9], A2)]
    for policy in (FORK, KEEP):
        first, second = (samples(resolve(history, policy)) for _ in range(2))
        assert [one.to_dict() for one in first] == [one.to_dict() for one in second]


def test_54_a_client_that_strips_reasoning_trains_only_after_what_the_engine_saw() -> None:
    thought = [4, 30, 5, 30, 2]
    stripped = [*P0, 30, 2, *U1]
    history = [turn(P0, thought), turn(stripped, thought), turn([*stripped, 30, 2, *U1], thought)]
    with pytest.raises(MergeFault, match="turn 1 does not continue turn 0: at index 10"):
        raise resolve(history, REJECT).fault or AssertionError
    forked = samples(resolve(history, FORK))
    assert [one.tokens.tolist() for one in forked] == [
        P0 + thought, stripped + thought, [*stripped, 30, 2, *U1, *thought],
    ]  # fmt: skip
    result = resolve(history, KEEP)
    (kept,) = samples(result)
    assert [(call.start, call.end) for call in kept.calls] == [(36, 41)]
    assert kept.prompt_length == len(P0)
    assert dropped(result) == [(1, 10, 5), (2, 23, 5)]


def test_every_dropped_id_is_counted_with_the_first_rewriting_that_reached_it() -> None:
    history = [
        turn([1], [2, 3]), turn([1, 2, 3, 4], [5, 6]), turn([1, 2, 3, 4, 9], [7]),
        turn([1, 8], [7]),
    ]  # fmt: skip
    # Turn 2 left turn 0 alone and rewrote the reply of turn 1; turn 3 rewrote what was left.
    assert dropped(resolve(history, KEEP)) == [(2, 4, 2), (3, 1, 3)]


# --- public reports ------------------------------------------------------------------------------
def test_case_126_of_a_request_sent_twice_the_reply_that_the_client_went_on_with_is_kept() -> None:
    again = [31, 32, 2]
    history = [*BASE, turn(P0 + A1 + O1, again), turn([*P0, *A1, *O1, *again, *U1], A2)]
    result = resolve(history, KEEP)
    (kept,) = samples(result)
    assert kept.tokens.tolist() == [*P0, *A1, *O1, *again, *U1, *A2]
    assert len(kept.calls) == 3
    assert dropped(result) == [(2, len(P0 + A1 + O1), len(A2))]


def test_case_127_lines_that_interleave_never_mix() -> None:
    other = [1, 20, 10, 30, 2]
    history = [
        turn(P0, A1), turn(other, [31]), turn(P0 + A1 + O1, A2), turn([*other, 31, *U1], [32]),
    ]  # fmt: skip
    first, second = samples(resolve(history, FORK))
    assert first.tokens.tolist() == P0 + A1 + O1 + A2
    assert second.tokens.tolist() == [*other, 31, *U1, 32]
    result = resolve(history, KEEP)
    (kept,) = samples(result)
    assert kept.tokens.tolist() == second.tokens.tolist()
    assert sum(masks(kept)) == 2
    assert dropped(result) == [(1, 1, 3), (2, 1, 0), (3, 1, 2)]


def test_case_128_a_summary_in_place_of_twenty_turns_is_one_sample_with_its_log_probs() -> None:
    held, history = list(P0), []
    for place in range(20):
        history.append(turn(held, [40 + place, 2]))
        held = [*held, 40 + place, 2, *U1]
    summary = [*P0[:6], 10, 1, 23, 10, 77, 2, 10, 1, 22, 10]
    history += [turn(summary, A1, A1_LOG_PROBS), turn(summary + A1 + O1, A2, A2_LOG_PROBS)]
    result = resolve(history, KEEP)
    (kept,) = samples(result)
    assert kept.rollout_log_probs is not None
    expected = np.array([*A1_LOG_PROBS, *[0.0] * 11, *A2_LOG_PROBS], np.float32)
    assert kept.rollout_log_probs.tolist() == expected.tolist()
    assert dropped(result) == [(20, 8, 40)]
    assert [len(one.calls) for one in samples(resolve(history, FORK))] == [20, 2]


def test_case_129_going_on_after_a_cut_turn_is_left_out_and_the_status_says_so() -> None:
    cut = turn(P0, [31, 32])
    cut.finish = "length"
    for policy in DivergencePolicy:
        (kept,) = samples(resolve([cut, turn([*P0, 31, 32, 2, *U1], A2)], policy))
        assert kept.tokens.tolist() == [*P0, 31, 32]
        assert kept.status is Status.TRUNCATED


def rows(number: int, start: int, end: int) -> Replay:
    values = np.arange(number * 100 + start, number * 100 + end, dtype=np.int32)
    return Replay(start, values.reshape(-1, 1, 1))


def test_rows_are_the_newest_of_the_turns_that_were_fed_the_same_ids_up_to_there() -> None:
    history = [
        turn([1, 2, 3, 4], [5, 6]), turn([1, 2, 9], [7]), turn([1, 2, 3, 4, 5, 6, 8], [7]),
    ]  # fmt: skip
    history[0].routed_experts = rows(0, 0, 5)
    history[1].routed_experts = rows(1, 0, 3)
    history[2].routed_experts = rows(2, 5, 7)
    (kept,) = samples(resolve(history, KEEP))
    assert kept.rollout_routed_experts is not None
    assert kept.rollout_routed_experts[:, 0, 0].tolist() == [100, 101, 2, 3, 4, 205, 206]


def test_a_branch_takes_the_rows_that_it_did_not_ask_for_from_the_turn_that_fed_them() -> None:
    history = [
        turn([1, 2, 3], [4, 5]), turn([1, 2, 3, 4, 5, 6], [7]), turn([1, 2, 3, 4, 9], [8, 8]),
    ]  # fmt: skip
    history[0].routed_experts = rows(0, 0, 4)
    history[1].routed_experts = rows(1, 4, 6)
    # Index 4 is the first that differs: rows 0-3 are the ones of turn 0 and 1, row 4 is its own.
    history[2].routed_experts = rows(2, 4, 6)
    for policy in (FORK, KEEP):
        sample = samples(resolve(history, policy))[-1]
        assert sample.tokens.tolist() == [1, 2, 3, 4, 9, 8, 8]
        assert sample.rollout_routed_experts is not None
        assert sample.rollout_routed_experts[:, 0, 0].tolist() == [0, 1, 2, 3, 204, 205]
    history[2].routed_experts = rows(2, 5, 6)  # row 4 is of an id that no other turn was fed
    assert [len(one.calls) for one in samples(resolve(history, FORK))] == [2]
    result = resolve(history, KEEP)
    assert samples(result)[0].tokens.tolist() == [1, 2, 3, 4]
    assert (dropped(result), result.left_out) == ([(2, 4, 1)], 2)
    assert result.merged[0].gap == "routed_experts of record 3 starts at row 5: rows are missing"


# --- cost ----------------------------------------------------------------------------------------
@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many ids were compared, one entry per look."""
    looks: list[int] = []
    original = ids_module._compare

    def counted(a: Any, b: Any) -> Any:
        looks.append(len(a))
        return original(a, b)

    monkeypatch.setattr(ids_module, "_compare", counted)
    return looks


def views(turns: int, each: int, rewrites: Sequence[int] = ()) -> list[TurnRecord]:
    """Return a session that appends to one array, and takes a new one where it rewrites."""
    made: list[TurnRecord] = []
    memory = np.arange(2 * turns * each, dtype=np.int32)
    for place in range(turns):
        if place in rewrites:
            memory = memory.copy()
            memory[: each // 2] += 1
        start = 2 * place * each + each
        made.append(turn(memory[:start], memory[start : start + each].copy()))
        made[-1].prompt_ids = memory[:start]
    return made


@pytest.mark.parametrize("policy", [FORK, KEEP])
def test_ids_of_one_memory_are_compared_once_whatever_the_history(
    policy: DivergencePolicy, compared: list[int]
) -> None:
    costs = []
    for turns in (32, 64, 128):
        compared.clear()
        history = views(turns, 64, rewrites=[turns // 2])
        result = resolve(history, policy)
        assert len(result.divergences) == 1
        costs.append(sum(compared))
        assert costs[-1] < 3 * 2 * 64 * turns
    assert costs[2] < 4.2 * costs[0]


@pytest.mark.parametrize("policy", [FORK, KEEP])
def test_agents_that_take_turns_in_memory_of_their_own_are_compared_once_each(
    policy: DivergencePolicy, compared: list[int]
) -> None:
    turns, each = 64, 64
    agents = [views(turns, each), views(turns, each), views(turns, each)]
    for number, own in enumerate(agents):
        assert own[-1].prompt_ids is not None
        own[-1].prompt_ids[each - 1 - number] = 0  # the same memory: of every prompt of this one
    history = [one for together in zip(*agents, strict=True) for one in together]
    result = resolve(history, policy)
    assert len(result.divergences) == 3 * turns - 1
    assert [len(one.calls) for one in samples(result)] == [turns] * (3 if policy is FORK else 1)
    assert sum(compared) < 3 * 3 * 2 * each * turns


def test_a_shorter_view_of_the_same_memory_ends_where_it_ends() -> None:
    memory = np.arange(20, dtype=np.int32)
    history = [turn(memory, [90 + place]) for place in range(3)]
    for one, length in zip(history, (12, 7, 9), strict=True):
        one.prompt_ids = memory[:length]
    result = resolve(history, FORK)
    assert [(one.turn, one.index) for one in result.divergences] == [(1, 7), (2, 7)]
    assert [one.tokens.tolist() for one in samples(result)] == [
        [*range(12), 90], [*range(7), 91], [*range(9), 92],
    ]  # fmt: skip


@pytest.mark.parametrize("policy", [FORK, KEEP])
def test_a_client_that_rewrites_at_every_turn_costs_its_input_once(
    policy: DivergencePolicy, compared: list[int]
) -> None:
    # Every prompt has the one before it, not what was sampled: 64 histories of one beginning.
    turns, each = 64, 32
    tokens = np.arange(turns * each, dtype=np.int32)
    history = [
        turn(tokens[: place * each].copy(), np.full(8, 9_000 + place)) for place in range(1, turns)
    ]
    size = sum(len(one.prompt_ids) for one in history if one.prompt_ids is not None)
    result = resolve(history, policy)
    assert len(result.divergences) == turns - 2
    assert sum(compared) < 2 * size


def test_the_tree_has_four_nodes_a_turn_at_most_and_a_depth_is_a_number_of_ids() -> None:
    rng = np.random.default_rng(5)
    tree, held, added = PrefixTree(), as_ids(rng.integers(0, 4, 1000)), []
    for _ in range(200):
        prompt = held[: rng.integers(1, 1000)].copy()
        prompt[rng.integers(0, len(prompt))] = rng.integers(0, 4)
        added.append((prompt, as_ids(rng.integers(0, 4, 5))))
        tree.add(*added[-1])
    nodes, seen = [tree.root], 0
    while nodes:
        node = nodes.pop()
        seen += 1
        for first, child in node.children.items():
            assert (child.parent, child.depth - node.depth) == (node, len(child.edge))
            assert first == child.edge[0]
        nodes += node.children.values()
    assert seen <= 1 + 4 * 200
    for (prompt, output), end in zip(added, tree.ends, strict=True):
        parts: list[Any] = []
        node = end
        while node.parent is not None:
            parts.insert(0, node.edge)
            node = node.parent
        assert np.concatenate(parts).tolist() == [*prompt.tolist(), *output.tolist()]


def test_rows_are_copied_once_though_every_reply_brings_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []
    original = replay._pieces

    def counted(patches: Any, num_rows: int) -> Any:
        pieces, missing = original(patches, num_rows)
        copied.append(sum(len(rows) for _, rows in pieces))
        return pieces, missing

    monkeypatch.setattr(replay, "_pieces", counted)
    history = views(64, 16)
    for one in history:
        assert one.prompt_ids is not None
        fed = len(one.prompt_ids) + len(one.output_ids) - 1
        one.routed_experts = Replay(0, np.zeros((fed, 1, 1), np.int32))
    (sample,) = samples(resolve(history, REJECT))
    assert sample.rollout_routed_experts is not None
    num_rows = len(sample.rollout_routed_experts)
    assert copied == [num_rows, num_rows], "looked for a gap, then copied"
