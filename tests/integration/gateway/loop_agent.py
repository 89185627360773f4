"""An agent for the tests of whole workers: a loop over HTTP that says what its client saw.

It never raises and it never retries: whatever the gateway answers with an error, it ends with the
reward 0, as an agent does whose author thought of everything.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx


async def run(
    base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any], **kw: Any
) -> dict[str, Any]:
    """Ask `metadata["turns"]` times; streams every other one."""
    messages, replies = list(prompt), []
    _note(metadata, "began", base_url)
    async with httpx.AsyncClient(timeout=60) as client:
        for turn in range(metadata["turns"]):
            body = {"model": "m", "messages": messages, "stream": turn % 2 == 1, **request_kwargs}
            answer = await client.post(f"{base_url}/v1/chat/completions", json=body)
            if answer.status_code != 200:
                return {"reward": 0.0, "status": answer.status_code, "replies": replies}
            message = _streamed(answer.text) if turn % 2 else _message(answer.json())
            if message is None:
                return {"reward": 0.0, "status": "broken stream", "replies": replies}
            replies.append(message["content"])
            messages += [message, {"role": "user", "content": f"And with {turn + 3} more?"}]
    return {"reward": 1.0, "status": 200, "replies": replies}


async def abort(base_url: str, metadata: dict[str, Any], **kw: Any) -> None:
    """Note that it was told, and take a moment over it."""
    await asyncio.sleep(0.2)
    _note(metadata, "aborted", base_url)


def _note(metadata: dict[str, Any], what: str, base_url: str) -> None:
    if path := metadata.get("notes"):
        with Path(path).open("a") as notes:
            notes.write(f"{what} {base_url}\n")


def _message(body: Any) -> dict[str, Any]:
    message: dict[str, Any] = body["choices"][0]["message"]
    return message


def _streamed(text: str) -> dict[str, Any] | None:
    """Return the message that the deltas make; None where the stream says an error."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if lines[-1:] != ["[DONE]"]:
        return None
    for line in lines[:-1]:
        event = json.loads(line)
        if "error" in event:
            return None
        for choice in event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = message.get(name, "") + delta[name]
    return message
