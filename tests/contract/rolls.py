"""Whole rollouts for the hard cases: `multi_turn`, the real client, real HTTP, either vocabulary.

A conversation is a list of texts (control strings in them are their ids) or of exact ids; what is
held against the sample are the bodies that the engine got and the bytes that it answered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rollstream.sample import Sample
from tests.generate_stage import OverHttp, Says, check, engine_of, given
from worker.generate import multi_turn
from worker.types import Tool

END = "<|im_end|>"
QUESTION = [{"role": "user", "content": "hi"}]
Reply: TypeAlias = "str | Says"


class Recorder:
    """A tool that keeps what it was called with."""

    def __init__(self, name: str, answer: Any = "ok", **schema: Any) -> None:
        self.name, self.answer, self.calls = name, answer, list[dict[str, Any]]()
        self.spec = {
            "type": "function",
            "function": {
                "name": name, "description": "", "parameters": {"type": "object", **schema},
            },
        }  # fmt: skip

    async def __call__(self, arguments: dict[str, Any]) -> Any:
        self.calls.append(arguments)
        return self.answer(arguments) if callable(self.answer) else self.answer


@dataclass
class Rolled:
    """A finished trajectory and what the engine was asked for it."""

    sample: Sample
    requests: list[dict[str, Any]]
    renderer: Any

    @property
    def prompts(self) -> list[list[int]]:
        """The prompt ids of every request."""
        return [body["input_ids"] for body in self.requests]

    def observed(self, turn: int = 0) -> str:
        """What the environment wrote behind a turn, decoded from its ids."""
        calls = self.sample.calls
        end = calls[turn + 1].start if turn + 1 < len(calls) else len(self.sample.tokens)
        return str(self.renderer.decode(self.sample.tokens[calls[turn].end : end]))


def says(renderer: Any, text: str, **fields: Any) -> Says:
    """Return a reply of this text, whose control strings are their ids."""
    ids = renderer.encode_raw(text).tolist()
    return Says(ids, matched=ids[-1] if text.endswith(END) else None, **fields)


def block(text: str) -> str:
    """Return a tool call's markup around `text`."""
    return f"<tool_call>\n{text}\n</tool_call>"


def call_of(name: str, arguments: str = "{}") -> str:
    """Return a well-formed call."""
    return block(f'{{"name":"{name}","arguments":{arguments}}}')


async def rolled(
    renderer: Any,
    *replies: Reply,
    tools: Sequence[Tool] = (),
    prompt: Any = QUESTION,
    generate: Any = multi_turn,
    limits: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Rolled:
    """Run a conversation over HTTP; a text without an end gets one."""
    steps = [
        says(renderer, reply if reply.endswith(END) else reply + END)
        if isinstance(reply, str)
        else reply
        for reply in replies
    ]
    async with engine_of("http", *steps) as engine:
        assert isinstance(engine, OverHttp)
        stage = given(
            engine, renderer, prompt, tools={tool.name: tool for tool in tools} or None,
            limits={"max_context": 8192} | dict(limits or {}), **fields,
        )  # fmt: skip
        sample = (await generate(stage)).samples
        asked, requests = engine.asked, engine.bodies
    assert isinstance(sample, Sample)
    earlier = len(stage.sample.calls)
    if not earlier:
        check(sample, asked, steps[: len(asked)])
    sample.validate()
    return Rolled(sample, requests, renderer)
