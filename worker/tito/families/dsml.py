"""DeepSeek V4's calls and results, which the package reads or refuses where it should not.

Owns the reading of DSML calls by the id of their marker, and several results in one suffix.
Never reads a marker that is only spelled. Invariant: linear in the reply's length (the package's
scanner decodes every prefix of it).

    <DSML tool_calls>                              DSML stands for its marker's id
    <DSML invoke name="look">
    <DSML parameter name="word" string="true">né</DSML parameter>
    </DSML invoke>
    </DSML tool_calls>
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from ..calls import strict_json
from ..settled import Openings
from .strict import Rules, Strict, lost_attempt

MARK = "｜DSML｜"
_SIGN = "\ufdd0"
"""Stands for the marker's id in decoded text; a character that no text has."""
_SECTION = re.compile(rf"<{_SIGN}(?:tool_calls|toolcalls|tool)>")
_SECTION_END = re.compile(rf"</{_SIGN}tool_calls>")
_INVOKE, _INVOKE_END = f"<{_SIGN}invoke", f"</{_SIGN}invoke>"
_NAME = re.compile(r' name="([^"\n]*)">')
_PARAMETER = re.compile(rf'<{_SIGN}parameter name="([^"\n]*)" string="(true|false)">')
_PARAMETER_END = f"</{_SIGN}parameter>"


class DeepSeekV4(Strict):
    """The package's renderer of DeepSeek V4 with its calls read here."""

    # What stands before a marker's id belongs to it; the sign is replaced where it is spelled.
    openings = Openings(texts=(f"<{MARK}", _SIGN))

    def __init__(self, tokenizer: Any, inner: Any, rules: Rules) -> None:
        super().__init__(tokenizer, inner, rules)
        self._mark = tokenizer.token_id(MARK)

    def _suffix(
        self, messages: list[dict[str, Any]], sampled: list[int], tools: list[Any] | None
    ) -> list[int] | None:
        # The package sorts results by the ids of their calls, which a suffix does not hold, so it
        # refuses more than one. Here they stand in the order that they were given in.
        ids: list[int] = self._inner._render(
            messages,
            tools=None,
            add_generation_prompt=True,
            add_bos=False,
            add_effort_prompt=False,
        ).token_ids
        return ids

    def _parse_piece(self, ids: list[int], tools: list[Any] | None) -> tuple[str, list[Any]]:
        text = self._with_signs(ids)
        section = _SECTION.search(text)
        first = section.start() if section else text.find(_INVOKE)
        if first < 0:
            return text.replace(_SIGN, MARK).strip(), []
        content, rest = text[:first], text[first:]
        calls = [_read_invoke(piece) for piece in _invokes(rest)]
        if not calls:
            calls = [lost_attempt(rest, None)]
        for call in calls:
            call.raw = call.raw.replace(_SIGN, MARK)
        return content.replace(_SIGN, MARK).strip(), calls

    def _with_signs(self, ids: list[int]) -> str:
        """Return the text of ids, the marker's id as one sign and a spelled sign as U+FFFD."""
        pieces: list[str] = []
        begin = 0
        for place, number in enumerate(ids):
            if number == self._mark:
                pieces.append(self._tokenizer.decode(ids[begin:place]))
                begin = place + 1
        pieces.append(self._tokenizer.decode(ids[begin:]))
        return _SIGN.join(piece.replace(_SIGN, "\ufffd") for piece in pieces)


class WithOffsets:
    """Our tokenizer with offsets that nobody reads.

    Without any, the package's renderer finds them by decoding: token by token, or, where a
    character has several tokens, every prefix of the prompt.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, **_: Any) -> dict[str, list[Any]]:
        """Encode."""
        ids = self._tokenizer.encode(text)
        return {"input_ids": ids, "offset_mapping": [(0, 0)] * len(ids)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _invokes(text: str) -> list[tuple[str, bool]]:
    """Return (text, closed) of each call of a section, up to its end marker."""
    found: list[tuple[str, bool]] = []
    at = text.find(_INVOKE)
    section_end = _SECTION_END.search(text)
    while at >= 0 and not (section_end and section_end.start() < at):
        end = text.find(_INVOKE_END, at)
        following = text.find(_INVOKE, at + len(_INVOKE))
        if end < 0 or 0 <= following < end:
            stop = len(text) if following < 0 else following
            found.append((text[at:stop], False))
            at = following
        else:
            behind = end + len(_INVOKE_END)
            found.append((text[at:behind], True))
            at = text.find(_INVOKE, behind)
    return found


def _read_invoke(piece: tuple[str, bool]) -> SimpleNamespace:
    raw, closed = piece
    call = lost_attempt(raw, None)
    if not closed:
        call.status = "unclosed_block"
        return call
    name = _NAME.match(raw, len(_INVOKE))
    if name is None:
        return call
    call.name = name[1]
    body = raw[name.end() : -len(_INVOKE_END)]
    rest, call.status = _read_parameters(body, call.arguments)
    if rest.strip():
        call.status = "malformed_structure"
    elif not call.name:
        call.status = "missing_name"
    return call


def _read_parameters(body: str, arguments: dict[str, Any]) -> tuple[str, str]:
    """Fill `arguments`; return what is no parameter, and a status."""
    rest: list[str] = []
    at, status = 0, "ok"
    while found := _PARAMETER.search(body, at):
        end = body.find(_PARAMETER_END, found.end())
        if end < 0:
            break
        rest.append(body[at : found.start()])
        name, text = found[1], body[found.end() : end]
        value: Any = text
        if found[2] == "false":
            try:
                value = strict_json(text)
            except (ValueError, RecursionError):
                status = "malformed_structure"  # it says that it is JSON, and is none
        if name in arguments:
            status = "malformed_structure"
        arguments[name] = value
        at = end + len(_PARAMETER_END)
    return "".join([*rest, body[at:]]), status
