"""From a sample to what a person reads: who said what, turn after turn, and how long it took.

Owns the way from tokens, calls and kept messages to turns with texts. Never prints, never escapes.
Invariant: which tokens a turn has comes from the calls alone; a text says where it comes from, and
a text that cannot be told apart by turns is given whole rather than guessed.

Where texts come from, the first that there is:

    a reply        its ids decoded; the kept message; its stretch of the stored response
    between them   the kept messages; the ids decoded; its stretch of the stored response

Axes: L all tokens, T turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.sample import Call, Message, Sample, Span

Decode = Callable[[Sequence[int]], str]

ASSISTANT, CONTEXT = "assistant", "context"
"""`context` is what no engine sampled and nobody gave a role."""
_CHATML = re.compile(r"<\|im_start\|>([a-z_]+)\n")
_CHATML_END = "<|im_end|>"
MARKS = (
    ("reasoning", "<think>", "</think>"),
    ("reasoning", "[THINK]", "[/THINK]"),
    ("reasoning", "<|channel|>analysis<|message|>", "<|end|>"),
    ("call", "<tool_call>", "</tool_call>"),
    ("call", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ("call", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ("call", "[TOOL_CALLS]", ""),
    ("call", "<|python_tag|>", ""),
)
"""What families write around reasoning and calls; an empty end is that of the reply."""
_OPENINGS = re.compile("|".join(re.escape(opening) for _, opening, _ in MARKS))
_OF_OPENING = {opening: (kind, end) for kind, opening, end in MARKS}


@dataclass(slots=True)
class Said:
    """One message."""

    role: str
    text: str
    name: str = ""
    """Of the tool that answered."""
    calls: list[dict[str, Any]] = field(default_factory=list)
    """Calls that a kept message has beside its text: `name`, `arguments`, `id`."""


@dataclass(slots=True)
class Turn:
    """One reply, and what was observed behind it."""

    number: int
    start: int
    """Of its reply in the sample's tokens."""
    end: int
    calls: list[Call]
    """More than one where the reply was stopped and gone on with."""
    reply: Said | None = None
    """None: nobody knows its text."""
    behind: list[Said] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    """As the worker read them: `name`, `arguments`, `id`, `executed`."""
    spans: list[Span] = field(default_factory=list)


@dataclass(slots=True)
class Story:
    """All of one sample."""

    before: list[Said]
    """The prompt, and what an environment showed before the first reply."""
    turns: list[Turn]
    source: str
    """Where the texts come from, for people."""
    whole: str = ""
    """The response, where it could not be told apart by turns."""


def tell(sample: Sample, decode: Decode | None = None) -> Story:
    """Return a sample's turns with all the texts that there are.

    Args:
        sample: with its calls; its response where it was read.
        decode: from ids to text; None where there is no tokenizer.
    """
    turns = turns_of(sample)
    for turn in turns:
        turn.spans = [span for span in sample.spans if span.turn == turn.number]
    _add_tool_calls(sample, turns)
    kept = _kept(sample, len(turns))
    before = kept[0] if kept else prompt_of(sample)
    source, whole = _fill(sample, turns, kept, decode)
    return Story(before, turns, source, whole)


def turns_of(sample: Sample) -> list[Turn]:
    """Return the turns by the calls: a reply that was stopped and gone on with is one."""
    turns: list[Turn] = []
    for call in sample.calls:
        last = turns[-1] if turns else None
        if last and last.calls[-1].finish == "abort" and last.end == call.start:
            last.end = call.end
            last.calls.append(call)
        else:
            turns.append(Turn(len(turns), call.start, call.end, [call]))
    return turns


def prompt_of(sample: Sample) -> list[Said]:
    """Return the prompt as messages, with what an environment showed at first."""
    prompt = sample.prompt
    said = [Said("user", prompt)] if isinstance(prompt, str) else [_said(one) for one in prompt]
    env = sample.metadata.get("env")
    first = env.get("reset") if isinstance(env, Mapping) else None
    return said + [_said(one) for one in first or () if isinstance(one, Mapping)]


def _add_tool_calls(sample: Sample, turns: Sequence[Turn]) -> None:
    calls = sample.metadata.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        number = call.get("turn") if isinstance(call, Mapping) else None
        if isinstance(number, int) and 0 <= number < len(turns):
            turns[number].tool_calls.append(dict(call))


# --- texts ---------------------------------------------------------------------------------------
def _fill(
    sample: Sample, turns: Sequence[Turn], kept: list[list[Said]], decode: Decode | None
) -> tuple[str, str]:
    """Give every turn its texts; return where they come from, and what is left as a whole."""
    if decode is not None:
        whole = ""
        if turns:
            _decode(sample, turns, kept, decode)
        else:  # nobody recorded which call sampled what
            whole = decode(sample.tokens[sample.prompt_length :].tolist())
        others = "; what stands between them: the messages that were kept" if kept else ""
        return f"decoded from the ids of the tokens{others}", whole
    if kept:
        for turn, said in zip(turns, kept[1:], strict=True):
            turn.reply, turn.behind = said[0], said[1:]
        return "the messages that [debug] messages kept", ""
    if not sample.response:
        return "no text was kept, and there is no tokenizer: give --tokenizer FILE", ""
    if len(turns) == 1 and turns[0].end - turns[0].start == sample.response_length:
        turns[0].reply = Said(ASSISTANT, _ended(sample.response))
        return "the stored response", ""
    parts = split_chatml(sample.response, is_reply=True)
    replies = [place for place, part in enumerate(parts) if part.role == ASSISTANT]
    if parts and replies and not parts[-1].text and len(replies) == len(turns) + 1:
        del parts[-1], replies[-1]  # the opener of a reply that never came
    if not turns or len(replies) != len(turns):
        why = "not told apart by turns: give --tokenizer FILE, or keep [debug] messages"
        return f"the stored response, {why}", sample.response
    for turn, place, end in zip(turns, replies, [*replies[1:], len(parts)], strict=True):
        turn.reply, turn.behind = parts[place], parts[place + 1 : end]
    return "the stored response, told apart by its <|im_start|> marks", ""


def _decode(sample: Sample, turns: Sequence[Turn], kept: list[list[Said]], decode: Decode) -> None:
    ends = [*(turn.start for turn in turns[1:]), len(sample.tokens)]
    for place, (turn, end) in enumerate(zip(turns, ends, strict=True)):
        turn.reply = Said(ASSISTANT, _ended(decode(sample.tokens[turn.start : turn.end].tolist())))
        if kept:
            reply, *turn.behind = kept[place + 1]
            turn.reply.calls = reply.calls
        elif end > turn.end:
            turn.behind = split_chatml(decode(sample.tokens[turn.end : end].tolist()))


def split_chatml(text: str, *, is_reply: bool = False) -> list[Said]:
    """Return the messages of a stretch of ChatML; one of no role where it is none.

    Args:
        text: behind a prompt, or between two replies.
        is_reply: it begins inside a reply.
    """
    found = list(_CHATML.finditer(text))
    if not found and not is_reply:
        return [Said(CONTEXT, text)] if text.strip() else []
    first = found[0].start() if found else len(text)
    parts = [Said(ASSISTANT, _ended(text[:first]))] if is_reply else []
    if not is_reply and _ended(text[:first]).strip():
        parts.append(Said(CONTEXT, text[:first]))
    for place, mark in enumerate(found):
        end = found[place + 1].start() if place + 1 < len(found) else len(text)
        said = _ended(text[mark.end() : end])
        is_opener = place + 1 == len(found) and mark[1] == ASSISTANT and not is_reply
        if not is_opener or said.strip():
            parts.append(Said(_role_of(mark[1], said), said))
    return parts


def _role_of(role: str, said: str) -> str:
    return "tool" if role == "user" and said.lstrip().startswith("<tool_response>") else role


def _ended(text: str) -> str:
    """Return a text without the mark that ends a ChatML message."""
    stripped = text.rstrip("\n")
    return stripped.removesuffix(_CHATML_END) if stripped.endswith(_CHATML_END) else text


# --- kept messages -------------------------------------------------------------------------------
def _kept(sample: Sample, num_turns: int) -> list[list[Said]]:
    """Return kept messages as [before, turn 0, turn 1, …]; empty where they do not fit the turns.

    The replies of the sample are the last ones: a client may have begun with some of its own.
    """
    messages = sample.metadata.get("messages")
    if not isinstance(messages, list):
        return []
    said = [_said(one) for one in messages if isinstance(one, Mapping)]
    replies = [place for place, one in enumerate(said) if one.role == ASSISTANT]
    if len(replies) < num_turns or not said:
        return []
    if num_turns == 0:
        return [said]
    starts = replies[-num_turns:]
    ends = [*starts[1:], len(said)]
    return [said[: starts[0]], *(said[a:b] for a, b in zip(starts, ends, strict=True))]


def _said(message: Message | Mapping[str, Any]) -> Said:
    calls = []
    for call in message.get("tool_calls") or ():
        if isinstance(call, Mapping):
            function = call.get("function")
            inner = function if isinstance(function, Mapping) else call
            calls.append(
                {"id": call.get("id", ""), "name": inner.get("name", ""),
                 "arguments": inner.get("arguments", "")}
            )  # fmt: skip
    text = _text_of(message.get("content"))
    if reasoning := message.get("reasoning_content"):
        text = f"<think>\n{_text_of(reasoning)}\n</think>\n{text}"
    name = message.get("name")
    return Said(str(message.get("role", CONTEXT)), text, str(name) if name else "", calls)


def _text_of(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(_part_of(part) for part in content)
    return str(content)


def _part_of(part: Any) -> str:
    if not isinstance(part, Mapping):
        return str(part)
    text = part.get("text")
    return text if isinstance(text, str) else f"[{part.get('type', 'part')}]"


# --- marks inside a reply ------------------------------------------------------------------------
def parts_of(text: str) -> list[tuple[str, str]]:
    """Split a reply into (kind, text): `reasoning`, `call` or `text`, in order and complete."""
    parts: list[tuple[str, str]] = []
    at = 0
    opening, closing = text.find("<think>"), text.find("</think>")
    if closing >= 0 and not 0 <= opening < closing:  # the prompt opened it
        at = closing + len("</think>")
        parts.append(("reasoning", text[:at]))
    while mark := _OPENINGS.search(text, at):
        kind, end = _OF_OPENING[mark[0]]
        stop = text.find(end, mark.end()) if end else len(text)
        stop = len(text) if stop < 0 else stop + len(end)
        if mark.start() > at:
            parts.append(("text", text[at : mark.start()]))
        parts.append((kind, text[mark.start() : stop]))
        at = stop
    if at < len(text):
        parts.append(("text", text[at:]))
    return parts
