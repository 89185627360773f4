"""Trees of sessions, what is picked of them, and the samples that come of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.errors import ConfigError, MergeFault, Status, StopReason
from tests.generate_stage import Says
from tests.toy import A1, A2, HI, NO, OK, P0, U1
from tests.unit.gateway.play import Held, Play, echo, system, take, user, wait_until
from worker.gateway import collect
from worker.gateway import session as session_module
from worker.gateway.picker import Leaf, resolve_picker
from worker.generate.finish import finish
from worker.types import DivergencePolicy, GenerateOutput, Replay

TREE = {"kind": "tree"}
ALL = {"kind": "tree", "picker": resolve_picker("all")}


def tree(*steps: Any, **changes: Any) -> Play:
    """Return a session of the kind tree."""
    return Play(*steps, rules=TREE | changes.pop("rules", {}), **changes)


def shared_prefix(one: Any, other: Any) -> int:
    """Return how many tokens two samples have in common."""
    count = min(len(one.tokens), len(other.tokens))
    same = one.tokens[:count] == other.tokens[:count]
    return count if same.all() else int(np.argmin(same))


async def test_111_a_divergence_deep_in_history_is_a_branch() -> None:
    play = tree(Says(A1), Says(A2), Says([30, 30, 2]), Says([31, 2]))
    history: list[Any] = []
    await play.go_on(history, *HI)
    other = list(history)
    await play.go_on(history, *NO)
    await play.go_on(history, *OK)
    await play.go_on(other, *OK)
    samples = await play.end()
    assert len(play.session._tree.nodes) == 4
    assert sorted(len(s.metadata["tree"]["path"]) for s in samples) == [2, 3]
    deep, shallow = samples
    # The first turn is in both and trains in the first.
    assert shared_prefix(deep, shallow) > len(P0 + A1)
    assert deep.loss_mask[:3].tolist() == [1, 1, 1]  # type: ignore[index]
    assert shallow.loss_mask[:3].tolist() == [0, 0, 0]  # type: ignore[index]
    assert deep.calls[0] == shallow.calls[0]
    assert shallow.rollout_log_probs[:3].tolist() == [-1 / 128, -2 / 128, -3 / 128]  # type: ignore[index]
    assert deep.metadata["tree"]["owns"] == [0, 1, 2]
    assert shallow.metadata["tree"]["owns"] == [3]


async def test_112_two_roots_are_two_samples_the_later_root_first() -> None:
    play = tree(Says([10, 11, 2]), Says([70, 71, 2]))
    await play.ask([system("main"), *HI])
    await play.ask([system("sub"), *HI])
    sub, main = await play.end()
    assert sub.tokens[-3:].tolist() == [70, 71, 2]
    assert main.tokens[-3:].tolist() == [10, 11, 2]
    assert sub.metadata["tree"]["parents"] == [None, None]
    assert (sub.reward, main.reward) == (None, None)
    assert play.session.stats["dropped_tokens"] == 0


async def test_116_samples_come_by_the_length_of_their_path_then_the_latest() -> None:
    """Not by their tokens."""
    play = Play(Says([30] * 40 + [2]), Says(A1), Says(A2), Says(A2), rules=ALL)
    await play.ask([system("long"), *HI])
    history: list[Any] = [system("deep")]
    await play.go_on(history, *HI)
    await play.go_on(history, *NO)
    await play.ask([system("late"), *HI])
    samples = await play.end()
    assert [s.metadata["tree"]["leaf"] for s in samples] == [2, 3, 0]


async def test_34_leaves_share_the_rollout_id_and_one_leaf_is_a_list_of_one() -> None:
    """Here it is always set."""
    play = tree(Says(A1))
    await play.ask(HI)
    (only,) = await play.end()
    assert isinstance(await play.session.collect(), list)
    assert only.rollout_id == play.given.sample.index
    assert only.loss_mask.tolist() == [1, 1, 1]  # type: ignore[union-attr]


async def test_115_a_retry_drops_the_line_before_it_though_that_is_longer() -> None:
    play = tree(Says(A1), Says([31, 2]), Says([32, 2]), Says([30, 30, 2]))
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.go_on(history, *NO)
    await play.go_on(history, *OK)
    await play.ask(HI)
    (kept,) = await play.end()
    assert kept.tokens.tolist() == [*P0, 30, 30, 2]
    (warning,) = kept.metadata["tree"]["warnings"]
    assert "longer than every later sibling's deepest leaf" in warning
    assert play.session.stats["dropped_tokens"] == 7


async def test_115_of_retries_the_order_counts_and_not_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([100.0, 90.0])
    play = tree(Says(A1), Says(A2))
    clock = _Clock(times)
    monkeypatch.setattr(session_module, "time", clock)
    await play.ask(HI)
    await play.ask(HI)
    (kept,) = await play.end()
    assert kept.tokens.tolist() == P0 + A2
    (warning,) = kept.metadata["tree"]["warnings"]
    assert "wall-clock rollback" in warning


class _Clock:
    def __init__(self, times: Any) -> None:
        self._times = times

    def time(self) -> float:
        """Return the next time."""
        return float(next(self._times))


async def test_115_the_retry_that_was_gone_on_with_stays() -> None:
    play = tree(Says([31, 2]), Says([32, 2]), Says(A1))
    one = await play.ask(HI)
    await play.ask(HI)
    await play.ask([*HI, echo(one), *NO])
    (kept,) = await play.end()
    assert kept.tokens.tolist() == [*P0, 31, 2, *U1, *A1]


async def test_all_keeps_every_leaf_and_each_reply_trains_once() -> None:
    play = Play(Says([31, 2]), Says([32, 2]), Says(A1), rules=ALL)
    one = await play.ask(HI)
    await play.ask(HI)
    await play.ask([*HI, echo(one), *NO])
    samples = await play.end()
    assert [s.metadata["tree"]["path"] for s in samples] == [[0, 2], [1]]
    assert play.session.stats["dropped_tokens"] == 0


async def test_resends_deep_in_a_tree_are_dropped_at_every_level() -> None:
    play = tree(default=lambda asked: Says([30 + len(asked.ids) % 3, 2]))
    history: list[Any] = []
    for new in (HI, NO, OK):
        await play.go_on(history, *new)
        await play.ask(history[:-1])
        await play.ask(history[:-1])
    samples = await play.end()
    assert len(samples) == 1
    assert len(play.session._tree.nodes) == 9


async def test_concurrent_branches_all_train() -> None:
    steps = [Held(Says([30 + n, 2])) for n in range(3)]
    play = tree(Says(A1), *steps)
    first = await play.ask(HI)
    behind = [*HI, echo(first)]
    coming = [asyncio.create_task(play.ask([*behind, user(f"q{n}")])) for n in range(3)]
    await wait_until(lambda: play.engine.in_flight == 3)
    for step in reversed(steps):
        step.go.set()
    await asyncio.gather(*coming)
    samples = await play.end()
    assert len(samples) == 3
    assert play.session.stats["raced"] == 2
    assert [bool(s.loss_mask[:3].any()) for s in samples] == [True, False, False]  # type: ignore[index]


async def test_leaves_pass_the_check_on_what_generate_functions_return() -> None:
    play = Play(default=lambda asked: Says(A1), rules=ALL)
    history: list[Any] = []
    await play.go_on(history, *HI)
    for number in range(3):
        await play.ask([*history, user(f"q{number}")])
    samples = await play.end()
    leaves = finish(play.given.sample, GenerateOutput(samples), play.renderer.decode)
    assert leaves is samples
    assert len({id(sample.metadata) for sample in samples}) == 3


async def test_a_long_session_is_put_together_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "LONG_TOKENS", 4)
    play = Play(Says(A1), Says(A2))
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.go_on(history, *NO)
    assert len((await play.the_sample()).calls) == 2


async def test_nothing_is_written_as_json_again_to_be_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play(Says(A1), Says(A2))
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.go_on(history, *NO)
    monkeypatch.delattr("worker.tito.trajectory.ids_json")
    assert len((await play.the_sample()).calls) == 2


async def test_25_the_conversation_is_kept_for_people_where_that_is_asked_for() -> None:
    """The calls of a reply are those that the client got, not markup."""
    play = Play(Says(A1), Says(A2), debug_messages=True)
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.go_on(history, *OK)
    sample = await play.the_sample()
    roles = [message["role"] for message in sample.metadata["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant"]
    quiet = Play(Says(A1))
    await quiet.ask(HI)
    assert "messages" not in (await quiet.the_sample()).metadata


async def test_a_leaf_that_was_cut_is_truncated_and_the_others_are_not() -> None:
    play = Play(Says(A1), Says([30], "length"), rules=ALL)
    await play.ask(HI)
    await play.ask(NO, max_tokens=1)
    cut, whole = await play.end()
    assert (cut.status, cut.stop_reason) == (Status.TRUNCATED, StopReason.TURN_LENGTH)
    assert (whole.status, whole.stop_reason) == (Status.COMPLETED, StopReason.STOP)


async def test_76_the_pending_sample_is_never_changed_and_each_leaf_has_its_own_metadata() -> None:
    play = Play(Says(A1), Says(A2), rules=ALL)
    play.given.sample.metadata = {"row": 1}
    await play.ask(HI)
    await play.ask(NO)
    one, other = await play.end()
    one.metadata["x"] = 1
    assert other.metadata["row"] == 1
    assert "x" not in other.metadata
    assert play.given.sample.metadata == {"row": 1}


# --- replay --------------------------------------------------------------------------------------
class _Routed:
    """An engine that brings routed experts: row r of a prompt says its token's id."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.cancelled, self.in_flight = 0, 0
        self.silent = False

    @property
    def asked(self) -> Any:
        return self.inner.asked

    @property
    def said(self) -> Any:
        return self.inner.said

    async def generate(self, prompt: Any, sampling: Any, **rest: Any) -> Any:
        completion = await self.inner.generate(prompt, sampling, **rest)
        start = prompt.replay_start
        assert start is not None
        fed = [*self.inner.asked[-1].ids, *completion.ids.tolist()][start:-1]
        rows = np.array(fed, np.int32).reshape(-1, 1, 1)
        if not self.silent:
            completion.routed_experts = Replay(start, rows)
        return completion


def routed(*steps: Any, **changes: Any) -> Play:
    """Return a session whose engine brings routed experts."""
    from tests.unit.gateway.play import Engine

    return Play(engine=_Routed(Engine(steps, None)), replay=True, **changes)


async def test_69_rows_are_asked_for_from_the_last_token_that_is_known_also_by_a_retry() -> None:
    play = routed(Says(A1), Says(A2), Says([30, 30, 2]), Says([50, 2]))
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.ask([*history, *NO])
    await play.ask([*history, *NO])
    await play.ask(NO)
    checkpoint = len(P0 + A1)
    assert play.engine.inner.starts == [0, checkpoint - 1, checkpoint - 1, 0]
    await play.session.close()


async def test_24_rows_of_a_line_are_all_of_its_tokens() -> None:
    play = routed(Says(A1), Says(A2), Says([30, 30, 2]), rules=ALL)
    history: list[Any] = []
    await play.go_on(history, *HI)
    await play.ask([*history, *NO])
    await play.ask([*history, *OK])
    for sample in await play.end():
        experts = sample.rollout_routed_experts
        assert experts is not None
        assert experts[:, 0, 0].tolist() == sample.tokens[:-1].tolist()


async def test_an_engine_that_stops_to_bring_rows_is_a_merge_error() -> None:
    play = routed(Says(A1), Says(A2))
    history: list[Any] = []
    await play.go_on(history, *HI)
    play.engine.silent = True
    await play.go_on(history, *NO)
    await play.session.close()
    with pytest.raises(MergeFault):
        await play.session.collect()


# --- pickers of the user's -----------------------------------------------------------------------
def picks(text: str, tmp_path: Path) -> str:
    """Write a picker and return its path."""
    path = tmp_path / f"p{abs(hash(text))}.py"
    path.write_text(text)
    return f"{path}:pick"


async def _two_roots(picker: str) -> Play:
    play = Play(
        Says(A1), Says(A2), rules={"kind": "tree", "picker": resolve_picker(picker)},
        debug_messages=True,
    )  # fmt: skip
    await play.ask(HI)
    await play.ask(NO)
    return play


async def test_118_a_picker_of_ones_own_sees_lines_and_returns_some(tmp_path: Path) -> None:
    path = picks(
        "def pick(leaves):\n"
        "    assert [l.path for l in leaves] == [(0,), (1,)]\n"
        "    return [l for l in leaves if l.messages[0]['content'] == 'hi']\n",
        tmp_path,
    )
    play = await _two_roots(path)
    (kept,) = await play.end()
    assert kept.tokens.tolist() == P0 + A1
    assert play.session.stats["dropped_tokens"] == len(A2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def pick(leaves): raise KeyError('x')", "KeyError"),
        (("import dataclasses\n"
         "def pick(leaves): return [dataclasses.replace(l) for l in leaves]"), "subset"),
        ("def pick(leaves): return [leaves[0], leaves[0]]", "duplicates"),
        ("def pick(leaves): return []", "no leaf"),
        ("def pick(leaves): return None", "NoneType"),
        ("def pick(leaves): raise SystemExit(3)", "SystemExit"),
    ],
)  # fmt: skip
async def test_118_a_picker_that_breaks_its_promise_is_named(
    text: str, said: str, tmp_path: Path
) -> None:
    path = picks(text, tmp_path)
    play = await _two_roots(path)
    samples = await play.end()  # what was generated is kept, as `drop_retries` picks it
    assert [sample.tokens.tolist()[-len(A2) :] for sample in samples] == [A2, A1[-len(A2) :]]
    assert play.session.stats["dropped_tokens"] == 0
    for sample in samples:
        assert (sample.status, sample.stop_reason) == (Status.FAILED, StopReason.AGENT_ERROR)
        assert sample.metadata["error"].startswith(f"AgentFault: picker {path!r} ")
        assert said in sample.metadata["error"]
        assert sample.metadata["error_detail"] == "picker"
    (warning,) = samples[0].metadata["tree"]["warnings"]
    assert f"AgentFault: {warning}" == samples[0].metadata["error"]


def test_118_a_picker_must_not_be_async_and_must_exist(tmp_path: Path) -> None:
    for path in (
        picks("async def pick(leaves): return leaves", tmp_path),
        picks("pick = 3", tmp_path),
        "nowhere.at_all:pick",
    ):
        with pytest.raises(ConfigError, match="failed to resolve"):
            resolve_picker(path)
    with pytest.raises(ConfigError, match="did you mean 'drop_retries'"):
        resolve_picker("drop_retrys")


def test_a_leaf_compares_by_identity() -> None:
    one = Leaf(0, (0,), (0,), [], 1, 1, StopReason.STOP, 0.0)
    assert one != Leaf(0, (0,), (0,), [], 1, 1, StopReason.STOP, 0.0)


# --- 120 parity ----------------------------------------------------------------------------------
async def _script(rules: dict[str, Any]) -> Sequence[Any]:
    """Play nine requests with retries of the first, second and last turn."""
    play = Play(
        *(Says([30, 30 + n % 3, 40 + n, 2], version=n) for n in range(9)),
        rules=rules,
    )
    turns = [HI, NO, OK, NO, OK, NO, OK]
    history: list[Any] = []
    for turn, new in enumerate(turns):
        for _ in range(2 * (turn == 5)):
            await play.ask([*history, *new])  # answered, and asked again
        await play.go_on(history, *new, stream=turn == 6)
    assert len(play.engine.asked) == 9
    return await play.end()


async def test_120_retries_give_a_linear_and_a_tree_session_the_same_sample_bit_for_bit() -> None:
    (linear,) = await _script({})
    (leaf,) = await _script(TREE)
    assert linear.weight_versions == leaf.weight_versions == [0, 1, 2, 3, 4, 7, 8]
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        assert getattr(linear, name).tobytes() == getattr(leaf, name).tobytes()
    assert linear.calls == leaf.calls
    assert linear.response == leaf.response
    agent = [s.metadata["agent"] | {"superseded": 0} for s in (linear, leaf)]
    assert agent[0] == agent[1]


async def test_fork_with_retries_is_one_scalar_sample() -> None:
    (sample,) = await _script({"on_divergence": DivergencePolicy.FORK})
    assert "tree" not in sample.metadata


async def test_fork_keeps_an_edit_that_its_client_did_not_know_of() -> None:
    """Two edits of one turn at once are two lines; one after the other the second takes over."""
    for at_once in (True, False):
        steps = [Held(Says([40, 2])), Held(Says([41, 2]))]
        play = Play(Says(A1), *steps, rules={"on_divergence": DivergencePolicy.FORK})
        first = await play.ask(HI)
        behind = [*HI, echo(first)]
        exchanges = []
        for step, new in zip(steps, (NO, OK), strict=True):
            exchanges.append(await play.begin([*behind, *new]))
            step.go.set()
            if not at_once:
                await take(exchanges[-1])
        if at_once:
            for exchange in exchanges:
                await take(exchange)
        assert len(await play.end()) == (2 if at_once else 1)
