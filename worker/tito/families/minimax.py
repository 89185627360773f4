"""MiniMax M2: what its vocabulary and its template fix.

Owns data, and which renderer reads it.
"""

from __future__ import annotations

from typing import Any

from .family import CallForm, Family, Proof
from .strict import Rules, Strict, package

_CLOSE = "[e~["
_THINK = ("<think>", "</think>")
_CALL = ("<minimax:tool_call>", "</minimax:tool_call>")
_RULES = Rules(close=_CLOSE, reasoning=_THINK, attempt=_CALL[0], late_system=False, tagged=True)


def _minimax(tokenizer: Any, family: Family) -> Strict:
    return Strict(tokenizer, package(family, tokenizer), _RULES)


MINIMAX: dict[str, Family] = {
    "minimax-m2": Family(
        module="minimax_m2",
        renderer="MiniMaxM2Renderer",
        config="MiniMaxM2RendererConfig",
        build=_minimax,
        close=_CLOSE,
        tokens=dict.fromkeys(("]~!b[", "]~b]", _CLOSE, *_THINK, *_CALL)),
        options={"thinking_retention": "all"},
        reasoning=_THINK,
        opens_reasoning=True,
        call_form=CallForm.PARSED,
        markup=_CALL,
        models=("MiniMaxAI/MiniMax-M2", "MiniMaxAI/MiniMax-M2.5"),
        proof=Proof.TOY,
        note=(
            "a system message only first; a given history loses reasoning before its last user "
            "message"
        ),
    )
}
