"""gpt-oss: what its vocabulary and Harmony fix.

Owns data only; `harmony` has the format.
"""

from __future__ import annotations

from typing import Any

from .family import CallForm, Family, Proof
from .harmony import Harmony

_TOKENS: dict[str, int | None] = {
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
}


def _harmony(tokenizer: Any, family: Family) -> Harmony:
    return Harmony(tokenizer, **family.options)


def _gpt_oss(effort: str, models: tuple[str, ...] = ()) -> Family:
    return Family(
        module="gpt_oss",
        renderer="GptOssRenderer",
        config="GptOssRendererConfig",
        build=_harmony,
        close="<|end|>",
        closes=("<|return|>", "<|call|>"),
        stand_in="<|return|>",
        tokens=_TOKENS,
        options={"effort": effort, "date": "2025-08-05"},
        parallel_calls=False,
        call_form=CallForm.PARSED,
        models=models,
        proof=Proof.VERIFIED,
        note=(
            "a result needs the name of its function, or the order of the calls before it; the "
            "system message's date is fixed; one call per sampled turn"
        ),
    )


GPT_OSS: dict[str, Family] = {
    "gpt-oss": _gpt_oss("medium", ("openai/gpt-oss-20b", "openai/gpt-oss-120b")),
    "gpt-oss-low": _gpt_oss("low"),
    "gpt-oss-high": _gpt_oss("high"),
}
