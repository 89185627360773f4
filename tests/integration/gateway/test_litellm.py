"""litellm as an agent's client: with and without stream, with tools, and its errors."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.integration.gateway.toys import (
    RENDERER,
    Toy,
    call_text,
    engine_fault,
    said,
    spans_of,
    toy_gateway,
)
from tests.toy import A2, P0

pytestmark = pytest.mark.slow  # seconds to import


async def played(toy: Toy, scene: str) -> dict[str, Any]:
    """Return what an agent with litellm found."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.integration.gateway.litellm_agent", toy.url, scene,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(60):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode()[-2000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def results(*texts: str) -> list[int]:
    ids = [10]
    for text in texts:
        ids += [1, 23, 10, *RENDERER.encode(text).tolist(), 2, 10]
    return [*ids, 1, 22, 10]


@pytest.mark.parametrize("scene", ["whole", "stream"])
async def test_an_agent_with_litellm_leaves_one_sample(scene: str) -> None:
    both = said("<think>hello</think>" + call_text("calc", {"x": 1}) + call_text("calc", {"x": 2}))
    one = said("hello" + call_text("calc", {"x": 5}))
    async with toy_gateway(both, one, A2) as toy:
        found = await played(toy, scene)
        sample = await toy.sample()
    assert found == {
        "content": "hello", "usages": [len(both), len(one), len(A2)], "messages": 7,
    }  # fmt: skip
    assert [asked.streams for asked in toy.engine.asked] == [scene == "stream"] * 3
    assert toy.engine.prompts[0] == P0
    assert spans_of(sample) == [
        (both, 1), (results("2", "3"), 0), (one, 1), (results("6"), 0), (A2, 1),
    ]  # fmt: skip
    assert sample.metadata["agent"]["divergences"] == 0


async def test_errors_are_litellms_own_classes() -> None:
    async with toy_gateway(engine_fault(), limits={"max_context": 300}) as toy:
        found = await played(toy, "fail")
    assert found["errors"] == [
        "ServiceUnavailableError", "BadRequestError", "ContextWindowExceededError",
    ]  # fmt: skip
