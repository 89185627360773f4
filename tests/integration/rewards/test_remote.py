"""Rewards of a server of the user's, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollstream.errors import RewardFault
from rollstream.sample import Sample
from rollstream.settings import RewardTable
from tests.builders import a_prompt, a_sample
from worker.rewards import Scorer, build_scorer

from .parts import Plain, serving

GROUP = a_prompt()


@asynccontextmanager
async def scoring(url: str, **table: Any) -> AsyncIterator[Scorer]:
    known = {"kind": "remote", "url": url, "retry_backoff_s": 0.001, "timeout_s": 10.0}
    renderer: Any = Plain()
    scorer = build_scorer(RewardTable(**(known | table)), renderer=renderer, run_seed=0)
    try:
        yield scorer
    finally:
        await scorer.aclose()


def replied(text: str, **fields: Any) -> Sample:
    """Return an unscored sample whose one turn has this text."""
    known = {"label": "8", "prompt": "What is 4 + 4?", "metadata": {"level": 2}}
    turns = [([ord(char) for char in text], ())]
    return a_sample(turns=turns, reward=None, response=f"{text}<end>", **(known | fields))


async def reward_of(scorer: Scorer, sample: Sample) -> Any:
    await scorer.score(sample, GROUP)
    return sample.reward


def length(body: Any, _: int) -> Any:
    return [len(one["final_text"]) for one in body] if isinstance(body, list) else 0.5


async def test_remote_posts_one_sample_and_takes_a_number(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    async with serving(length) as server, scoring(server.url, token_file=token) as scorer:
        assert await reward_of(scorer, replied("eight", group_index=3)) == 0.5
    [body], [headers] = server.bodies, server.headers
    assert body == {
        "prompt": "What is 4 + 4?", "response": "eight<end>", "final_text": "eight", "label": "8",
        "metadata": {"level": 2}, "index": body["index"], "group_index": 3,
    }  # fmt: skip
    assert headers["Authorization"] == "Bearer s3cret"
    assert headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("answer", "key", "reward"),
    [
        (1, None, 1.0),
        (True, None, 1.0),
        ({"score": 0.25}, None, 0.25),
        ({"reward": 0.75, "score": 0.25}, None, 0.75),
        ({"score": 0.25, "note": "fine"}, "score", {"score": 0.25, "note": "fine"}),
        ({"reward": 0.5}, "accuracy", 0.5),
        (None, None, None),
    ],
)
async def test_remote_takes_numbers_and_objects(answer: Any, key: str | None, reward: Any) -> None:
    async with serving(lambda *_: answer) as server, scoring(server.url, key=key) as scorer:
        assert await reward_of(scorer, replied("x")) == reward


@pytest.mark.parametrize(
    ("answer", "detail", "num_tries"),
    [
        (lambda: "good", "invalid", 1),
        (lambda: {"verdict": 1}, "invalid", 1),
        (lambda: {"score": "high"}, "invalid", 1),
        (lambda: [1.0], "invalid", 1),
        (lambda: web.Response(text='{"score": NaN}'), "invalid", 1),
        (lambda: web.Response(text="1" + "0" * 400), "invalid", 1),
        (lambda: web.Response(text="<html>"), "invalid", 3),
        (lambda: web.Response(status=200), "invalid", 3),
        (lambda: {"error": "the judge sleeps"}, "unavailable", 3),
        (lambda: web.Response(status=500), "raised", 3),
        (lambda: web.Response(status=503, text="busy"), "unavailable", 3),
        (lambda: web.Response(status=429), "unavailable", 3),
        (lambda: web.Response(status=400, text="no such column"), "refused", 1),
        (lambda: web.Response(status=401), "refused", 1),
        (lambda: web.Response(status=302, headers={"location": "/"}), "refused", 1),
        (lambda: web.Response(text="1" * ((1 << 20) + 1)), "too_large", 1),
    ],
)
async def test_remote_has_no_verdict_where_the_answer_is_none(
    answer: Callable[[], Any], detail: str, num_tries: int
) -> None:
    async with serving(lambda *_: answer()) as server, scoring(server.url) as scorer:
        sample = replied("x")
        with pytest.raises(RewardFault) as caught:
            await reward_of(scorer, sample)
    assert (caught.value.detail, caught.value.retryable) == (detail, False)
    assert server.url in caught.value.message
    assert len(server.bodies) == num_tries
    assert sample.reward is None


async def test_remote_is_asked_again_until_it_answers() -> None:
    def third(_: Any, num_asked: int) -> Any:
        return 0.5 if num_asked == 3 else web.Response(status=503)

    async with serving(third) as server, scoring(server.url, max_retries=2) as scorer:
        assert await reward_of(scorer, replied("x")) == 0.5
        assert len(server.bodies) == 3


async def test_remote_that_is_not_there_or_hangs_is_no_verdict() -> None:
    async with scoring("http://127.0.0.1:1/score", max_retries=1) as scorer:
        with pytest.raises(RewardFault, match=r"\(asked 2 times\)") as caught:
            await reward_of(scorer, replied("x"))
        assert caught.value.detail == "unreachable"
    async with (
        serving(lambda *_: asyncio.sleep(30, 1.0)) as server,
        scoring(server.url, timeout_s=0.05, max_retries=0) as scorer,
    ):
        with pytest.raises(RewardFault, match=r"did not answer within 0\.05 s") as caught:
            await reward_of(scorer, replied("x"))
        assert caught.value.detail == "timeout"


async def test_remote_gathers_samples_up_to_the_size_of_a_batch() -> None:
    async with (
        serving(length) as server,
        scoring(server.url, batch_size=4, batch_wait_s=30.0) as scorer,
    ):
        texts = ["x" * n for n in range(1, 9)]
        rewards = await asyncio.gather(*(reward_of(scorer, replied(text)) for text in texts))
    assert rewards == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert [len(body) for body in server.bodies] == [4, 4]


async def test_remote_sends_what_it_has_when_nobody_else_comes() -> None:
    async with (
        serving(length) as server,
        scoring(server.url, batch_size=4, batch_wait_s=0.01) as scorer,
    ):
        assert await reward_of(scorer, replied("abc")) == 3.0
    assert [len(body) for body in server.bodies] == [1]


async def test_one_bad_answer_of_a_batch_spoils_no_other() -> None:
    def mixed(body: Any, _: int) -> Any:
        answers = {"bad": "nonsense", "gone": None, "late": {"error": "later"}}
        if len(body) == 1 and body[0]["final_text"] == "late":
            return [0.75]
        return [answers.get(one["final_text"], 0.5) for one in body]

    async with (
        serving(mixed) as server,
        scoring(server.url, batch_size=4, batch_wait_s=30.0) as scorer,
    ):
        samples = [replied(text) for text in ("fine", "bad", "gone", "late")]
        asked = (reward_of(scorer, one) for one in samples)
        found = await asyncio.gather(*asked, return_exceptions=True)
    assert (found[0], found[2], found[3]) == (0.5, None, 0.75)
    assert isinstance(found[1], RewardFault)
    assert found[1].detail == "invalid"
    assert [len(body) for body in server.bodies] == [4, 1]


@pytest.mark.parametrize("broken", ["refused", "short", "crash"])
async def test_a_batch_that_one_sample_breaks_is_asked_for_one_by_one(broken: str) -> None:
    def fragile(body: Any, _: int) -> Any:
        texts = [one["final_text"] for one in body]
        if "poison" not in texts:
            return [0.5] * len(body)
        return {
            "refused": web.Response(status=400, text="cannot digest"),
            "short": [0.5] * (len(body) - 1),
            "crash": web.Response(status=500),
        }[broken]

    async with (
        serving(fragile) as server,
        scoring(server.url, batch_size=3, batch_wait_s=30.0, max_retries=0) as scorer,
    ):
        asked = (reward_of(scorer, replied(text)) for text in ("fine", "poison", "good"))
        found = await asyncio.gather(*asked, return_exceptions=True)
    assert (found[0], found[2]) == (0.5, 0.5)
    assert isinstance(found[1], RewardFault)
    assert sorted(len(body) for body in server.bodies) == [1, 1, 1, 3]


async def test_a_sample_that_ends_while_it_waits_is_not_sent() -> None:
    async with (
        serving(length) as server,
        scoring(server.url, batch_size=2, batch_wait_s=30.0) as scorer,
    ):
        gone = asyncio.create_task(reward_of(scorer, replied("gone")))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert await reward_of(scorer, replied("stays")) == 5.0
    assert [[one["final_text"] for one in body] for body in server.bodies] == [["stays"]]


async def test_a_request_that_nobody_waits_for_any_more_is_ended() -> None:
    begun = asyncio.Event()

    async def hang() -> Any:
        begun.set()
        await asyncio.sleep(30)

    async with serving(lambda *_: hang()) as server, scoring(server.url) as scorer:
        asked = asyncio.create_task(reward_of(scorer, replied("x")))
        await begun.wait()
        [request] = scorer._remote._requests  # type: ignore[attr-defined]
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.wait((request,), timeout=10)
        assert request.cancelled()


async def test_closing_ends_what_waits() -> None:
    async with serving(lambda *_: asyncio.sleep(30, 1.0)) as server:
        async with scoring(server.url, batch_size=2, batch_wait_s=30.0) as scorer:
            asked = asyncio.create_task(reward_of(scorer, replied("x")))
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await asked


async def test_a_long_response_and_a_column_that_is_no_json() -> None:
    async with serving(length) as server, scoring(server.url) as scorer:
        assert await reward_of(scorer, replied("x" * 300_000)) == 0.5
        assert len(server.bodies[0]["response"]) == 300_005
        with pytest.raises(RewardFault, match="its columns are no JSON") as caught:
            await reward_of(scorer, replied("x", label={"a": object()}))
        assert caught.value.detail == "invalid"
        assert len(server.bodies) == 1
