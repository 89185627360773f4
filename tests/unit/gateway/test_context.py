"""The tokens at a point of a conversation: as a trajectory has them, shared, at a linear cost."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.toy import CLOSE, END, HI, a_completion
from tests.unit.gateway.play import LightEngine, Play, echo, user
from worker.gateway.context import Answer, Context
from worker.sampling import Sampling
from worker.tito import tokenizer as tokenizer_module
from worker.tito.ids import as_ids, prompt_ids
from worker.tito.trajectory import Trajectory

STOPS = (CLOSE, END)
IDS = st.lists(st.sampled_from([1, CLOSE, END, 10, 30, 31]), max_size=5)
TURN = st.tuples(IDS, st.lists(IDS, min_size=1, max_size=3))


@given(st.lists(st.sampled_from([1, CLOSE, 10, 30]), min_size=1, max_size=6),
       st.lists(TURN, min_size=1, max_size=5))  # fmt: skip
def test_a_context_is_what_a_trajectory_of_the_same_calls_is(
    prompt: list[int], turns: list[tuple[list[int], list[list[int]]]]
) -> None:
    first = prompt_ids(prompt)
    trajectory = Trajectory(first, STOPS)
    held: Context | None = None
    for number, (observed, replies) in enumerate(turns):
        # Without ids between them two replies are one turn for a trajectory: there is always one.
        between = [10, *observed]
        if held is None:
            held = Context(None, first)
        else:
            held = Context.behind(held, as_ids(between))
            trajectory.add_observation(as_ids(between))
        assert held.num_prompt == trajectory.num_tokens
        for ids in replies:
            assert held.request().pieces == trajectory.request().pieces
            assert held.request().num_tokens == trajectory.num_tokens
            completion = a_completion(ids, rid=f"{number}")
            held.add(Answer(completion, 0, 0, Sampling()))
            trajectory.add_completion(completion, dispatched_version=0, sampling={})
        assert held.num_tokens == trajectory.num_tokens
        assert held.window(STOPS).tolist() == trajectory.window().tolist()
        assert held.sampled().tolist() == trajectory.last_completion().tolist()
        assert held.num_tokens - held.num_root == trajectory.response_length


def test_branches_share_what_is_in_front_of_them() -> None:
    root = Context(None, prompt_ids([1, 2, 3]))
    root.add(Answer(a_completion([30, CLOSE]), 0, 0, Sampling()))
    branches = [Context.behind(root, as_ids([10 + n])) for n in range(2)]
    one, other = (branch.request().pieces for branch in branches)
    assert [a is b for a, b in zip(one, other, strict=True)] == [True, True, False]
    assert branches[0].parent is branches[1].parent is root


def test_json_given_with_an_observation_is_not_written_again() -> None:
    ids, json = as_ids([1, 2, 3]), b"1,2,3"
    with_json, without = (Trajectory(prompt_ids([9]), STOPS) for _ in range(2))
    with_json.add_observation(ids, json)
    without.add_observation(ids)
    assert with_json.request().pieces[1] is json
    assert with_json.request() == without.request()
    assert with_json.response_ids().tolist() == without.response_ids().tolist()


async def _tokenized(turns: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Play, list[Any]]:
    """Play turns of 512 ids; return how many characters were tokenized for them."""
    reply = [30] * 254 + [CLOSE]
    play = Play(
        engine=LightEngine(reply), limits={"max_context": 1 << 20},
        prompt=[user("x" * 245)], rules={"max_in_flight": 1},
    )  # fmt: skip
    total = 0
    encode = tokenizer_module.Tokenizer._encode_all

    def counted(self: Any, pieces: list[str]) -> list[int]:
        nonlocal total
        total += sum(map(len, pieces))
        return encode(self, pieces)

    monkeypatch.setattr(tokenizer_module.Tokenizer, "_encode_all", counted)
    history: list[Any] = []
    for _ in range(turns):
        history.append(user("x" * 245))
        history.append(echo(await play.ask(history)))
    monkeypatch.setattr(tokenizer_module.Tokenizer, "_encode_all", encode)
    return total, play, history


async def test_case_141_the_tokenizers_input_grows_with_the_new_text_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half, _, _ = await _tokenized(64, monkeypatch)
    whole, play, history = await _tokenized(128, monkeypatch)
    assert whole <= 2.02 * half
    assert whole <= 128 * 260
    newest = play.session._tree.newest
    assert newest is not None
    assert newest.context.num_tokens == pytest.approx(128 * 512, rel=0.01)
    # The same ids as of one render of the whole conversation.
    request = newest.context.request()
    ids = np.array([int(number) for number in b",".join(request.pieces).split(b",")], np.int32)
    assert (
        ids[: newest.context.num_prompt].tolist()
        == play.renderer.render(history[:-1], None).tolist()
    )
    # And the JSON of every piece is the very object that the request before it had.
    pieces = play.engine.pieces
    assert all(
        a is b for one, other in itertools.pairwise(pieces)
        for a, b in zip(one, other, strict=False)
    )  # fmt: skip
    await play.session.close()
    sample = await play.session.collect()
    assert sample.tokens.tolist() == ids.tolist()  # type: ignore[union-attr]


async def test_what_is_held_is_ids_log_probs_and_json_once() -> None:
    """Arrays and JSON of all nodes: no more than 4 + 4 bytes a token and its decimals."""
    play = Play(engine=LightEngine([30] * 100 + [CLOSE]), limits={"max_context": 1 << 20})
    history: list[Any] = [*HI]
    for turn in range(40):
        for _ in range(2):  # and a branch of each
            reply = await play.ask(history)
        history += [echo(reply), user(f"turn {turn}")]
    arrays: dict[int, int] = {}
    texts: dict[int, int] = {}
    tokens = 0
    nodes = play.session._tree.nodes
    for node in nodes:
        context = node.context
        arrays[id(context.observed.ids)] = context.observed.ids.nbytes
        texts[id(context.observed.json)] = len(context.observed.json)
        tokens += context.num_sampled
        for answer in context.answers:
            completion = answer.completion
            arrays[id(completion.ids)] = completion.ids.nbytes
            arrays[id(completion.log_probs)] = completion.log_probs.nbytes
            texts[id(completion.json)] = len(completion.json)
        assert node.reply.ids is completion.ids
        assert node.reply.log_probs is completion.log_probs
    observed = sum({id(o): len(o.ids) for n in nodes for o in (n.context.observed,)}.values())
    assert sum(arrays.values()) == 8 * tokens + 4 * observed
    assert sum(texts.values()) <= 3 * tokens + 5 * observed
    await play.session.close()
