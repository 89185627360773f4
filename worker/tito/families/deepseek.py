"""DeepSeek V3, R1 and V4: what their vocabularies and templates fix.

Owns data, and which renderer reads it. The ids are those of every published vocabulary since V3,
of which the later ones only name more of the reserved tokens.
"""

from __future__ import annotations

from typing import Any

from .dsml import DeepSeekV4, WithOffsets
from .family import CallForm, Family, Proof
from .strict import Rules, Strict, package

_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_TURNS: dict[str, int | None] = {_BOS: 0, _EOS: 1, "<｜User｜>": 128803, "<｜Assistant｜>": 128804}
_CALLS: dict[str, int | None] = {
    "<｜tool▁calls▁begin｜>": 128806,
    "<｜tool▁calls▁end｜>": 128807,
    "<｜tool▁call▁begin｜>": 128808,
    "<｜tool▁call▁end｜>": 128809,
    "<｜tool▁outputs▁begin｜>": 128810,
    "<｜tool▁outputs▁end｜>": 128811,
    "<｜tool▁output▁begin｜>": 128812,
    "<｜tool▁output▁end｜>": 128813,
    "<｜tool▁sep｜>": 128814,
}
_V4: dict[str, int | None] = {
    "<think>": 128821,
    "</think>": 128822,
    "｜DSML｜": 128825,
    "<｜latest_reminder｜>": 128828,
    "<｜action｜>": 128829,
    "<｜query｜>": 128830,
    "<｜authority｜>": 128831,
    "<｜domain｜>": 128832,
    "<｜title｜>": 128836,
    "<｜read_url｜>": 128845,
}
_THINK = ("<think>", "</think>")
_MARKUP = (*tuple(_CALLS)[:4], "<｜tool▁sep｜>")
_V3_RULES = Rules(close=_EOS, attempt="<｜tool▁calls▁begin｜>", reasoning=_THINK)
_V4_RULES = Rules(close=_EOS, reasoning=_THINK, late_system=False, tagged=True)


def _v3(tokenizer: Any, family: Family) -> Strict:
    return Strict(tokenizer, package(family, tokenizer), _V3_RULES)


def _v4(tokenizer: Any, family: Family) -> Strict:
    return DeepSeekV4(tokenizer, package(family, WithOffsets(tokenizer)), _V4_RULES)


def _deepseek_v4(*, enable_thinking: bool) -> Family:
    return Family(
        module="deepseek_v4",
        renderer="DeepSeekV4Renderer",
        config="DeepSeekV4RendererConfig",
        build=_v4,
        close=_EOS,
        tokens=_TURNS | _V4,
        options={
            "enable_thinking": enable_thinking,
            "drop_thinking": False,
            "thinking_retention": "all",
        },
        reasoning=_THINK,
        thinking=enable_thinking,
        call_form=CallForm.PARSED,
        markup=("｜DSML｜",),
        # The checkpoint's own encoder writes no reasoning unless it is asked to.
        models=() if enable_thinking else ("deepseek-ai/DeepSeek-V4-Flash-0731",),
        proof=Proof.VERIFIED,
        note="results stand in the order in which they were given; a system message only first",
    )


DEEPSEEK: dict[str, Family] = {
    "deepseek-v3": Family(
        module="deepseek_v3",
        renderer="DeepSeekV3Renderer",
        config="DeepSeekV3RendererConfig",
        build=_v3,
        close=_EOS,
        tokens=_TURNS | _CALLS,
        options={"thinking_retention": "all"},
        call_form=CallForm.PARSED,
        shows_tools=False,
        markup=(*_MARKUP, *_THINK),
        models=("deepseek-ai/DeepSeek-V3",),
        thinking=False,
        proof=Proof.VERIFIED,
        note="tool specs are not rendered: the template has no place for them",
    ),
    "deepseek-r1": Family(
        module="deepseek_r1",
        renderer="DeepSeekR1Renderer",
        config="DeepSeekR1RendererConfig",
        build=_v3,
        close=_EOS,
        tokens=_TURNS | _CALLS,
        options={"thinking_retention": "all"},
        call_form=CallForm.PARSED,
        shows_tools=False,
        markup=(*_MARKUP, *_THINK),
        models=("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-0528"),
        rewrites_turns=True,
        proof=Proof.TOY,
        note="reasoning markers are text where the vocabulary has none; no place for tool specs",
    ),
    "deepseek-v4": _deepseek_v4(enable_thinking=False),
    "deepseek-v4-thinking": _deepseek_v4(enable_thinking=True),
}
