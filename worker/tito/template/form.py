"""How one chat template wants its messages: found by rendering small probes, once, at start.

Owns what templates do differently with calls, empty content and roles. Never renders what a user
wrote, never encodes. Invariant: what a template would drop in silence (a role, the calls of a turn
that also has text) is an error that names the message, and what it would misread (arguments as an
object or as text, null content) is given in the form that it reads.

    arguments        an object where the template writes it as JSON, else JSON text
    other arguments  as they are; where the template can only iterate over an object, the text is
                     its one argument `arguments`
    no content       beside calls: "" , null, or no key; whichever of them shows the calls and no
                     word `None`
    late system      in its place, or refused: never moved
    content          text; one part of a list, where the template writes nothing else
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

from rollstream.errors import ConfigError
from rollstream.sample import Message

from .sandbox import RenderError, Specs

Plain = dict[str, Any]

# Words that no template has in it, one piece for whatever trims or splits.
USER, SAID, RESULT, SYSTEM = "quxuser", "quxsaid", "quxresult", "quxsystem"
NAME, KEY, VALUE, THOUGHT = "quxname", "quxkey", "quxvalue", "quxthought"
SECOND = "quxsecond"
CALL_ID, OTHER_ID = "call00001", "call00002"  # nine letters and digits: some templates insist
OTHER_TEXT = "[7, 7]"


class _Absent(Enum):
    KEY = "absent"


ABSENT = _Absent.KEY
"""No key `content` at all."""


class Render(Protocol):
    """Messages to text."""

    def __call__(self, messages: list[Plain], tools: Specs = None, *, prompt: bool = True) -> str:
        """Return the text, or raise `RenderError`."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """What a template takes."""

    takes_objects: bool = True
    """Arguments of calls as objects; else as JSON text."""
    wraps_text: bool = False
    """Arguments that are text break it."""
    empty: Any = ""
    """Content of a message that has calls and no text."""
    drops: frozenset[str] = frozenset()
    """What it leaves out in silence, of `system, late system, tool, calls, calls beside text,
    tools, reasoning`."""
    parallel_calls: bool = True
    """It takes several calls in one turn."""

    def assistant(self, content: str, calls: list[Plain]) -> Plain:
        """Return an assistant message with calls as the template takes them."""
        message: Plain = {"role": "assistant", "content": content, "tool_calls": calls}
        return self._adapted(message, None, lambda text: text)

    def apply(
        self, messages: list[Plain], originals: Sequence[Message], escape: Callable[[str], str]
    ) -> list[Plain]:
        """Return normalized messages in the template's form.

        Args:
            messages: normalized.
            originals: as they were given, assistant messages in the same places; text that a
                client wrote as arguments is kept letter for letter where the template takes text.
            escape: for such text.

        Raises:
            ValueError: the template would drop a part of a message; names it and its index.
        """
        applied = []
        for place, message in enumerate(messages):
            self._check(message, place)
            if message["role"] == "assistant":
                message = self._adapted(message, originals[place], escape)
            applied.append(message)
        return applied

    def _check(self, message: Plain, place: int) -> None:
        role, calls = message["role"], message.get("tool_calls")
        what = ""
        if role in self.drops:
            what = f"a message of role {role!r}"
        elif role == "system" and place and "late system" in self.drops:
            what = "a message of role 'system' behind other messages, in its place"
        elif calls and "calls" in self.drops:
            what = "tool calls"
        elif calls and message["content"] and "calls beside text" in self.drops:
            what = "the tool calls of a message that also has text"
        if what:
            raise ValueError(f"message {place}: the chat template does not write {what}")

    def _adapted(
        self, message: Plain, original: Message | None, escape: Callable[[str], str]
    ) -> Plain:
        message = dict(message)
        if "reasoning_content" in message:
            message["thinking"] = message["reasoning_content"]  # gpt-oss reads it under this name
        calls = message.get("tool_calls")
        if not calls:
            message.pop("tool_calls", None)
            return message
        given = list((original or {}).get("tool_calls") or [])
        message["tool_calls"] = [
            self._call(call, given[place] if place < len(given) else None, escape)
            for place, call in enumerate(calls)
        ]
        if not message["content"]:
            message["content"] = self.empty
            if self.empty is ABSENT:
                del message["content"]
        return message

    def _call(self, call: Plain, original: Any, escape: Callable[[str], str]) -> Plain:
        function = dict(call["function"])
        arguments = function["arguments"]
        if self.takes_objects:
            if self.wraps_text and not isinstance(arguments, dict):
                function["arguments"] = {"arguments": _as_text(arguments)}
        elif not isinstance(arguments, str):
            written = _written(original)
            function["arguments"] = _as_text(arguments) if written is None else escape(written)
        return {**call, "function": function}


def probe_form(render: Render, name: str) -> Form:
    """Return what a template takes.

    Raises:
        ConfigError: it does not even render a user's message and an assistant's.
    """
    user = {"role": "user", "content": USER}
    said = {"role": "assistant", "content": SAID}
    for messages, word in (([user], USER), ([user, said, user], SAID)):
        try:
            text = render(messages)
        except RenderError as error:
            raise ConfigError(
                f"{name}: it does not render a plain conversation of "
                f"{', '.join(m['role'] for m in messages)}: {error}"
            ) from None
        if word not in text:
            role = messages[-1]["role"] if word is USER else "assistant"
            raise ConfigError(f"{name}: it writes nothing for role {role!r}")
    form = _calls_form(render, user)
    drops = set(form.drops)
    system = {"role": "system", "content": SYSTEM}
    if _without(render, [system, user], SYSTEM):
        drops.add("system")
    late = _text(render, [user, said, system, user])
    if late is not None and late.find(SYSTEM) < late.find(SAID):
        drops.add("late system")
    call = form.assistant("", [_a_call({KEY: VALUE})]) if "calls" not in drops else said
    if _without(render, [user, call, _a_result()], RESULT):
        drops.add("tool")
    if _without(render, [user], NAME, tools=[a_tool()]):
        drops.add("tools")
    thinking = {**said, "reasoning_content": THOUGHT, "thinking": THOUGHT}
    if _without(render, [user, thinking], THOUGHT, prompt=False):
        drops.add("reasoning")
    return replace(form, drops=frozenset(drops))


def takes_parts_only(render: Render) -> bool:
    """Return whether a template writes content only where it is a list of parts."""
    user = {"role": "user", "content": USER}
    found = [_text(render, messages) for messages in ([user], as_parts([user]))]
    string, parts = (text is not None and USER in text for text in found)
    return parts and not string


def as_parts(messages: list[Plain]) -> list[Plain]:
    """Return messages whose text is one part of a list, as templates of vision models want it."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def a_tool() -> Plain:
    """Return a tool spec for probes."""
    parameters = {"type": "object", "properties": {KEY: {"type": "string"}}}
    function = {"name": NAME, "description": "d", "parameters": parameters}
    return {"type": "function", "function": function}


def _calls_form(render: Render, user: Plain) -> Form:
    for takes_objects in (True, False):
        for empty in ("", None, ABSENT):
            form = Form(takes_objects, False, empty)
            text = _with_calls(render, user, form, "", {KEY: VALUE})
            if text is None or not _shows(text, NAME, VALUE):
                continue
            two = _with_calls(render, user, form, "", {KEY: VALUE}, {KEY: SECOND})
            plain = _text(render, [user]) or ""
            if "None" in text.replace(plain, "") or f"{{'{KEY}'" in text:
                continue  # null as a word, or Python's spelling of an object
            other = _with_calls(render, user, form, "", OTHER_TEXT)
            wraps = takes_objects and (other is None or OTHER_TEXT not in other)
            both = _with_calls(render, user, form, SAID, {KEY: VALUE})
            loses = both is not None and not _shows(both, SAID, NAME)
            drops = frozenset(["calls beside text"] if loses else [])
            parallel = two is not None and _shows(two, VALUE, SECOND)
            return Form(takes_objects, wraps, empty, drops, parallel)
    return Form(drops=frozenset(["calls"]), parallel_calls=False)


def _with_calls(
    render: Render, user: Plain, form: Form, content: str, *arguments: Any
) -> str | None:
    """Return the text with calls, and with their results where the template wants them."""
    ids = [CALL_ID, OTHER_ID][: len(arguments)]
    calls = [_a_call(given, call_id) for given, call_id in zip(arguments, ids, strict=True)]
    message = form.assistant(content, calls)
    text = _text(render, [user, message, *map(_a_result, ids)])
    return _text(render, [user, message]) if text is None else text


def _a_call(arguments: Any, call_id: str = CALL_ID) -> Plain:
    function = {"name": NAME, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _a_result(call_id: str = CALL_ID) -> Plain:
    return {"role": "tool", "content": RESULT, "tool_call_id": call_id, "name": NAME}


def _text(
    render: Render,
    messages: list[Plain],
    tools: Specs = None,
    *,
    prompt: bool = True,
) -> str | None:
    try:
        return render(messages, tools, prompt=prompt)
    except RenderError:
        return None


def _without(
    render: Render,
    messages: list[Plain],
    word: str,
    tools: Specs = None,
    *,
    prompt: bool = True,
) -> bool:
    """Return whether the template renders these messages, but not this word."""
    text = _text(render, messages, tools, prompt=prompt)
    return text is not None and word not in text


def _shows(text: str, *words: str) -> bool:
    return all(word in text for word in words)


def _as_text(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)


def _written(original: Any) -> str | None:
    function = original.get("function", original) if isinstance(original, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return arguments if isinstance(arguments, str) else None
