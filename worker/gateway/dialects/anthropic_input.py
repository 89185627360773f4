"""What an Anthropic client sends, in OpenAI's form: system, messages, tools, choice of tools.

Owns the translation of content blocks, on the way in. Never renders, never compares, does no I/O.
Invariant: the same blocks give the same messages wherever in the conversation they stand, so that
a request that goes on behind an earlier one begins with the earlier one's messages; and the echo of
a reply of ours, block by block or in several messages, is the message that is stored.

    sent                                  becomes
    system, as text or blocks             one system message, blocks joined without a separator
    user: tool_result blocks              tool messages, in the client's order, before the text of
                                          the user messages that stand together
    user: text blocks                     one user message for each that the client sent
    assistant, also several in a row      one assistant message: text joined, thinking joined as
                                          reasoning_content, tool_use as tool_calls
    system among the messages             a system message there
    images, documents, server tools, …    400, with the path of the block
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from rollstream.sample import Message

from ..types import CallRule, ErrorKind, Refusal
from .rules import forced_choice

_BILLING = "x-anthropic-billing-header:"
"""Claude Code writes this line in front of its system prompt, with a hash that differs in every
request. It is for the API, not for a model, and no conversation would ever go on behind it."""
_ROLES = ("user", "assistant", "system")


def system_messages(given: Any) -> list[Message]:
    """Return the system message of a request, if there is one.

    Raises:
        Refusal: it is neither text nor a list of text blocks.
    """
    if given is None:
        return []
    blocks = [given] if isinstance(given, str) else _list(given, "system")
    texts = [
        _without_billing(block if isinstance(block, str) else _text_block(block, f"system.{place}"))
        for place, block in enumerate(blocks)
    ]
    text = "".join(texts)
    return [{"role": "system", "content": text}] if text else []


def conversation(given: Any) -> list[Message]:
    """Return the messages of a request.

    Raises:
        Refusal: a message or a block that has no form here, or an end behind which nothing can be
            answered; says its path.
    """
    messages = _list(given, "messages")
    if not messages:
        _refuse("messages", "at least one message is needed")
    out: list[Message] = []
    results: list[Message] = []
    texts: list[Message] = []

    def close_user_run() -> None:
        # Templates pair results with the calls right in front of them.
        out.extend(results)
        out.extend(texts)
        results.clear()
        texts.clear()

    behind_assistant = False
    for place, message in enumerate(messages):
        where = f"messages.{place}"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in _ROLES:
            _refuse(f"{where}.role", f"{role!r:.40} is none of {', '.join(_ROLES)}")
        if role == "user":
            _user(message, where, results, texts)
            behind_assistant = False
            continue
        close_user_run()
        if role == "system":
            out.append({"role": "system", "content": _texts(message.get("content"), where)})
            behind_assistant = False
            continue
        turn = _assistant(message, where)
        if behind_assistant:
            _join(out[-1], turn)
        else:
            out.append(turn)
        behind_assistant = True
    close_user_run()
    if behind_assistant:
        _refuse(
            f"messages.{len(messages) - 1}.role",
            "the conversation ends with an assistant message; a reply is never prefilled, end with "
            "a user message",
        )
    return out


def function_tools(given: Any) -> tuple[list[Message] | None, bool]:
    """Return tools in OpenAI's form, and whether one asks for strict arguments.

    Raises:
        Refusal: one of Anthropic's own tools, or one that is not shown from the beginning.
    """
    if given is None:
        return None, False
    tools = [_tool(tool, f"tools.{place}") for place, tool in enumerate(_list(given, "tools"))]
    return tools or None, any(tool.get("strict") is True for tool in given)


def call_rule(choice: Any) -> tuple[CallRule, int | None]:
    """Return what becomes of calls, and how many of them are given out.

    Raises:
        Refusal: the choice forces a call, or is none.
    """
    if choice is None:
        return CallRule.AUTO, None
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind in ("any", "tool"):
        raise forced_choice(json.dumps(kind))
    if kind not in ("auto", "none"):
        _refuse("tool_choice", 'expected {"type": "auto"} or {"type": "none"}')
    single = choice.get("disable_parallel_tool_use")
    if single is not None and not isinstance(single, bool):
        _refuse("tool_choice.disable_parallel_tool_use", "true or false")
    return CallRule.NONE if kind == "none" else CallRule.AUTO, 1 if single else None


def _user(message: Message, where: str, results: list[Message], texts: list[Message]) -> None:
    words: list[str] = []
    answers = 0
    for path, block in _blocks(message.get("content"), where):
        if block.get("type") == "tool_result":
            results.append(_result(block, path))
            answers += 1
        else:
            words.append(_text_block(block, path))
    if words or not answers:
        texts.append({"role": "user", "content": "".join(words)})


def _result(block: Mapping[str, Any], path: str) -> Message:
    call_id = block.get("tool_use_id")
    if not isinstance(call_id, str) or not call_id:
        _refuse(f"{path}.tool_use_id", "the id of the tool_use block that this answers")
    # `is_error` has no place in a chat template: what went wrong is what the text says.
    return {
        "role": "tool",
        "tool_call_id": call_id,
        "content": _texts(block.get("content"), path),
    }


def _assistant(message: Message, where: str) -> Message:
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for path, block in _blocks(message.get("content"), where):
        kind = block.get("type")
        if kind == "thinking":
            reasoning.append(_string(block, "thinking", path))
        elif kind == "redacted_thinking":
            continue  # unreadable for anybody but its writer
        elif kind == "tool_use":
            calls.append(_call(block, path))
        else:
            content.append(_text_block(block, path))
    turn: Message = {"role": "assistant", "content": "".join(content)}
    if any(reasoning):
        turn["reasoning_content"] = "".join(reasoning)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _call(block: Mapping[str, Any], path: str) -> dict[str, Any]:
    given = block.get("input")
    if given is None or given == "":
        given = {}
    if not isinstance(given, Mapping):
        _refuse(f"{path}.input", "an object of arguments")
    arguments = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
    return {
        "id": _string(block, "id", path),
        "type": "function",
        "function": {"name": _string(block, "name", path), "arguments": arguments},
    }


def _join(turn: Message, more: Message) -> None:
    """Add an assistant message to the one in front of it: clients send a reply in pieces."""
    turn["content"] += more["content"]
    if "reasoning_content" in more:
        turn["reasoning_content"] = turn.get("reasoning_content", "") + more["reasoning_content"]
    if "tool_calls" in more:
        turn["tool_calls"] = [*turn.get("tool_calls", []), *more["tool_calls"]]


def _tool(tool: Any, path: str) -> Message:
    if not isinstance(tool, Mapping):
        _refuse(path, "an object with name and input_schema")
    kind = tool.get("type")
    if kind not in (None, "custom"):
        _refuse(
            f"{path}.type",
            f"{kind!r:.60} is one of Anthropic's own tools, which nothing here can run; "
            "send tools of your own, with name, description and input_schema",
        )
    if tool.get("defer_loading"):
        _refuse(f"{path}.defer_loading", "every tool is in the prompt from the beginning; leave it")
    callers = tool.get("allowed_callers")
    if callers and callers != ["direct"]:
        _refuse(f"{path}.allowed_callers", 'only the model calls tools here: ["direct"]')
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        _refuse(f"{path}.input_schema", "an object (a JSON schema)")
    function: dict[str, Any] = {"name": _string(tool, "name", path)}
    if tool.get("description") is not None:
        function["description"] = _string(tool, "description", path)
    return {"type": "function", "function": {**function, "parameters": schema}}


def _blocks(content: Any, where: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the blocks of a message with their paths; a text is one block."""
    if isinstance(content, str):
        yield f"{where}.content", {"type": "text", "text": content}
        return
    for place, block in enumerate(_list(content, f"{where}.content")):
        path = f"{where}.content.{place}"
        if not isinstance(block, Mapping):
            _refuse(path, "an object with a type")
        yield path, block


def _texts(content: Any, where: str) -> str:
    if content is None:
        return ""
    return "".join(_text_block(block, path) for path, block in _blocks(content, where))


def _text_block(block: Any, path: str) -> str:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind != "text":
        _refuse(path, f"a block of type {kind!r:.60} cannot be carried; the model reads text only")
    return _string(block, "text", path)


def _string(block: Mapping[str, Any], name: str, path: str) -> str:
    found = block.get(name)
    if not isinstance(found, str):
        _refuse(f"{path}.{name}", f"{found!r:.40}: expected text")
    return found


def _list(given: Any, path: str) -> list[Any]:
    if not isinstance(given, list):
        _refuse(path, f"expected a list, got {type(given).__name__}")
    return given


def _without_billing(text: str) -> str:
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2]


def _refuse(path: str, what: str) -> NoReturn:
    raise Refusal(ErrorKind.INVALID, f"{path}: {what}", param=path)
