"""Nemotron 3 and 3.5: what their vocabularies and templates fix.

Owns data, and which renderer reads it.
"""

from __future__ import annotations

from typing import Any

from .family import CallForm, Family, Proof
from .strict import Rules, Strict, package

_CLOSE = "<|im_end|>"
_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
_TOKENS = ("<|im_start|>", _CLOSE, *_THINK, *_CALL, "<tool_response>", "</tool_response>")
_RULES = Rules(close=_CLOSE, reasoning=_THINK, attempt=_CALL[0], late_system=False, tagged=True)


def _nemotron(tokenizer: Any, family: Family) -> Strict:
    return Strict(tokenizer, package(family, tokenizer), _RULES)


def _family(renderer: str, models: tuple[str, ...], *, thinking: bool = True) -> Family:
    return Family(
        module="nemotron3",
        renderer=f"{renderer}Renderer",
        config=f"{renderer}RendererConfig",
        build=_nemotron,
        close=_CLOSE,
        tokens=dict.fromkeys(_TOKENS),
        options={
            "enable_thinking": thinking,
            "truncate_history_thinking": False,
            "thinking_retention": "all",
        },
        reasoning=_THINK,
        thinking=thinking,
        opens_reasoning=thinking,
        call_form=CallForm.PARSED,
        markup=_CALL,
        models=models,
        proof=Proof.TOY,
        note="text only; a system message only first; no reasoning effort hints",
    )


_THREE = (
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
)
_ULTRA = (
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8",
)
_LIGHTNING = ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",)

NEMOTRON: dict[str, Family] = {
    "nemotron-3": _family("Nemotron3", _THREE),
    "nemotron-3-no-thinking": _family("Nemotron3", (), thinking=False),
    "nemotron-3-ultra": _family("Nemotron3Ultra", _ULTRA),
    "nemotron-3.5": _family("Nemotron35", _LIGHTNING),
}
