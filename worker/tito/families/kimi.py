"""Kimi K2 and K2.5: what their vocabularies and templates fix.

Owns data, and the ids of calls: the format writes a call's id where others write its name
(`functions.look:0`), so a given history gets such ids where it has none.
"""

from __future__ import annotations

import re
from typing import Any

from .family import CallForm, Family, Proof
from .strict import Rules, Strict, package

_CLOSE = "<|im_end|>"
_TURNS = ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", _CLOSE)
_CALL = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
)
_MEDIA = ("<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>")
_THINK = ("<think>", "</think>")
_ID = re.compile(r"functions\.[^:]+:\d+")
_RULES = Rules(close=_CLOSE, attempt=_CALL[0], reasoning=_THINK)


class _Kimi(Strict):
    def __init__(self, tokenizer: Any, inner: Any, reader: Any) -> None:
        super().__init__(tokenizer, inner, _RULES)
        self._reader = reader

    def render_ids(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        return super().render_ids(
            _with_ids(messages, []), tools=tools, add_generation_prompt=add_generation_prompt
        )

    def _suffix(
        self, messages: list[dict[str, Any]], sampled: list[int], tools: list[Any] | None
    ) -> list[int] | None:
        if any(m["role"] == "tool" and not m.get("tool_call_id") for m in messages):
            calls = self.parse_response(sampled).tool_calls
            messages = _with_ids(messages, [call.id for call in calls if call.id])
        return super()._suffix(messages, sampled, tools)

    def _parse_piece(self, ids: list[int], tools: list[Any] | None) -> tuple[str, list[Any]]:
        # K2.5 has the calls of K2; its own reader falls back to markers that are only spelled.
        return self._read(self._reader, ids, tools)


def _with_ids(messages: list[dict[str, Any]], sampled: list[str]) -> list[dict[str, Any]]:
    """Return messages in which calls have ids of the format, and results those of their calls.

    Args:
        messages: normalized.
        sampled: ids that the model wrote in the turn before the messages.
    """
    filled: list[dict[str, Any]] = []
    waiting: dict[str, str] = {own: own for own in sampled}
    count = 0
    for message in messages:
        calls = message.get("tool_calls") or []
        if calls:
            waiting, named = {}, []
            for call in calls:
                given = call.get("id") or f"?{count}"
                fits = _ID.fullmatch(given)
                own = given if fits else f"functions.{call['function']['name']}:{count}"
                waiting[given] = own
                named.append({**call, "id": own})
                count += 1
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool":
            given = message.get("tool_call_id") or next(iter(waiting), "")
            if given in waiting:
                message = {**message, "tool_call_id": waiting.pop(given)}
        filled.append(message)
    return filled


def _k2(tokenizer: Any, family: Family) -> Strict:
    inner = package(family, tokenizer)
    return _Kimi(tokenizer, inner, inner)


def _k25(tokenizer: Any, family: Family) -> Strict:
    return _Kimi(tokenizer, package(family, tokenizer), package(KIMI["kimi-k2"], tokenizer))


def _kimi_k25(*, thinking: bool) -> Family:
    return Family(
        module="kimi_k25",
        renderer="KimiK25Renderer",
        config="KimiK25RendererConfig",
        build=_k25,
        close=_CLOSE,
        tokens=dict.fromkeys((*_TURNS, *_CALL, *_MEDIA)),
        options={"thinking": thinking, "thinking_retention": "all"},
        thinking=thinking,
        call_form=CallForm.PARSED,
        markup=(*_CALL, *_THINK),
        models=("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6") if thinking else (),
        proof=Proof.TOY,
        note="text only; a given history loses reasoning up to its last plain answer",
    )


KIMI: dict[str, Family] = {
    "kimi-k2": Family(
        module="kimi_k2",
        renderer="KimiK2Renderer",
        config="KimiK2RendererConfig",
        build=_k2,
        close=_CLOSE,
        tokens=dict.fromkeys((*_TURNS, *_CALL)),
        options={"thinking_retention": "all"},
        call_form=CallForm.PARSED,
        markup=(*_CALL, *_THINK),
        models=("moonshotai/Kimi-K2-Instruct",),
        proof=Proof.TOY,
        note="calls without an id get functions.NAME:INDEX",
    ),
    "kimi-k2.5": _kimi_k25(thinking=True),
    "kimi-k2.5-no-thinking": _kimi_k25(thinking=False),
}
