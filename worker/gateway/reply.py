"""From a parsed reply to the message that a client gets and that is stored: one and the same.

Owns what becomes of calls that cannot be executed, and the word that a reply ends with. Never
parses ids, never repairs a call. Invariant: nothing that the model wrote is lost, and what may not
be executed is content, so no client ever runs it.

    a good call          an entry of `tool_calls`, its arguments JSON encoded once, without spaces
    a malformed one      content, as the model wrote it, behind the rest of the content
    arguments too deep   the same: no template could show them again
    beyond `max_calls`   the same
    no tools offered,    all calls are content
      `tool_choice: none`
    the reply was cut    all calls are content: the last one may look complete and is not
"""

from __future__ import annotations

from typing import Any

from rollstream.sample import Message

from ..tito.deltas import arguments_text
from ..tito.messages import MAX_DEPTH
from ..types import AssistantMessage, Finish, ToolCall
from .types import CallRule, ChatRequest

STOP, TOOL_CALLS, LENGTH = "stop", "tool_calls", "length"


def call_rule(request: ChatRequest, *, is_cut: bool) -> CallRule:
    """Return what becomes of the calls of a reply.

    Args:
        request: what it answers.
        is_cut: it ended because it was long enough, or was aborted.
    """
    return CallRule.NONE if is_cut or not request.tools else request.call_rule


def reply_message(
    parsed: AssistantMessage, rule: CallRule = CallRule.AUTO, max_calls: int | None = None
) -> Message:
    """Return a reply in OpenAI's form: role, content, `reasoning_content` and `tool_calls` if any.

    Args:
        parsed: of all its ids.
        rule: see `call_rule`.
        max_calls: so many calls at most are given out as calls; None is no limit.
    """
    most = 0 if rule is CallRule.NONE else max_calls
    calls: list[dict[str, Any]] = []
    texts = [parsed.content] if parsed.content else []
    for call in parsed.tool_calls:
        is_within = most is None or len(calls) < most
        if call.problem is None and is_within and _is_shallow(call.arguments):
            calls.append(_entry(call))
        elif call.as_written:
            texts.append(call.as_written)
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def finish_word(finish: Finish, message: Message) -> str:
    """Return `stop`, `tool_calls` or `length`: why a reply ended, for its client."""
    if finish is not Finish.STOP:
        return LENGTH
    return TOOL_CALLS if message.get("tool_calls") else STOP


def _entry(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": arguments_text(call)}
    return {"id": call.id, "type": "function", "function": function}


def _is_shallow(value: Any, depth: int = 0) -> bool:
    if depth > MAX_DEPTH:
        return False
    if isinstance(value, dict):
        return all(_is_shallow(item, depth + 1) for item in value.values())
    return not isinstance(value, list) or all(_is_shallow(item, depth + 1) for item in value)
