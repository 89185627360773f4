"""Llama 3.2 Instruct: what its vocabulary and its template fix.

Owns data, and how the family's calls are read: one JSON object that is the whole reply, without
any marker. What begins like a call (`{"name": …`) is an attempt; other JSON is an answer.
"""

from __future__ import annotations

import re
from typing import Any

from ..calls import strict_json
from ..settled import Openings
from .family import CallForm, Family, Proof
from .strict import Rules, Strict, lost_attempt, package

_CLOSE = "<|eot_id|>"
_TOKENS: dict[str, int | None] = {
    "<|begin_of_text|>": 128000,
    "<|end_of_text|>": 128001,
    "<|start_header_id|>": 128006,
    "<|end_header_id|>": 128007,
    "<|eom_id|>": 128008,
    _CLOSE: 128009,
    "<|python_tag|>": 128010,
}
_RULES = Rules(close=_CLOSE, parallel_calls=False)
_ATTEMPT = re.compile(
    r'(?:<\|python_tag\|>)?\s*(\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:.*)', re.DOTALL
)


class _Llama(Strict):
    openings = Openings(first="{<")

    def _parse_piece(self, ids: list[int], tools: list[Any] | None) -> tuple[str, list[Any]]:
        text = self._tokenizer.decode(ids).strip()
        found = _ATTEMPT.fullmatch(text)
        if found is None:
            return text, []
        call = lost_attempt(found[1], (0, len(ids)))
        try:
            said = strict_json(found[1])
        except (ValueError, RecursionError):
            call.status, call.arguments = "invalid_json", found[1]
            return "", [call]
        arguments = said.get("parameters", said.get("arguments"))
        if set(said) - {"name", "parameters", "arguments", "type"}:
            return text, []  # an answer about something that has a name
        call.name, call.arguments, call.status = said["name"], arguments, "ok"
        return "", [call]


def _llama(tokenizer: Any, family: Family) -> Strict:
    return _Llama(tokenizer, package(family, tokenizer), _RULES)


LLAMA: dict[str, Family] = {
    "llama-3": Family(
        module="llama_3",
        renderer="Llama3Renderer",
        config="Llama3RendererConfig",
        build=_llama,
        close=_CLOSE,
        closes=(_CLOSE, "<|eom_id|>"),
        tokens=_TOKENS,
        options={"thinking_retention": "all"},
        thinking=False,
        parallel_calls=False,
        call_form=CallForm.PARSED,
        models=("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"),
        proof=Proof.VERIFIED,
        note=(
            "one call per turn, text beside it is not rendered; the prompt says 26 Jul 2024; with "
            "tools the first message behind the system message must be the user's"
        ),
    )
}
