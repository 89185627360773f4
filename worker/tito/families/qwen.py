"""Qwen3 and its successors: what their vocabularies and templates fix.

Owns data only. Qwen3's ids are those of its published text models. Qwen3.5 and Qwen3.6 share a
vocabulary; Qwen3.8's was not to be had, so its control tokens only have to be there.

The formats: Qwen3 writes calls as JSON, its successors as tags without quotes (`<parameter=x>`),
whose types come from the tool specs. Qwen3 lets the model open its reasoning; its successors open
it in the generation prompt, and take a system message only as the first of all.
"""

from __future__ import annotations

from typing import Any

from .family import CallForm, Family, Proof
from .strict import Rules, Strict, package

_NAMES = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
_QWEN3_IDS = (151643, 151644, 151645, 151657, 151658, 151665, 151666, 151667, 151668)
_QWEN35_IDS = (248044, 248045, 248046, 248058, 248059, 248066, 248067, 248068, 248069)
_SCAFFOLD = ("\n", "user", "user\n", "assistant\n", "<|im_start|>assistant\n", "\n\n")
_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>")
_RULES = Rules(
    close="<|im_end|>", reasoning=_THINK, attempt=_CALL[0], late_system=False, tagged=True
)


def _qwen3(*, enable_thinking: bool, models: tuple[str, ...], note: str = "") -> Family:
    return Family(
        module="qwen3",
        renderer="Qwen3Renderer",
        config="Qwen3RendererConfig",
        close="<|im_end|>",
        tokens=dict(zip(_NAMES, _QWEN3_IDS, strict=True)),
        scaffold=_SCAFFOLD,
        # "all": earlier reasoning stays where the engine saw it, so that a user message can follow.
        options={"enable_thinking": enable_thinking, "thinking_retention": "all"},
        reasoning=_THINK,
        markup=_CALL,
        thinking=enable_thinking,
        models=models,
        proof=Proof.VERIFIED,
        note=note,
    )


def _successor(
    version: str,
    *,
    enable_thinking: bool = True,
    models: tuple[str, ...] = (),
    proof: Proof = Proof.VERIFIED,
    ids: tuple[int | None, ...] = _QWEN35_IDS,
    note: str = "text only; a system message only first",
    **options: Any,
) -> Family:
    kind = f"Qwen{version}Renderer"
    return Family(
        module=f"qwen{version}",
        renderer=kind,
        config=f"{kind}Config",
        build=_built,
        close="<|im_end|>",
        tokens=dict(zip(_NAMES, ids, strict=True)),
        scaffold=_SCAFFOLD,
        options={"enable_thinking": enable_thinking, "thinking_retention": "all"} | options,
        reasoning=_THINK,
        markup=_CALL,
        thinking=enable_thinking,
        opens_reasoning=enable_thinking,
        call_form=CallForm.PARSED,
        models=models,
        proof=proof,
        note=note,
    )


def _built(tokenizer: Any, family: Family) -> Strict:
    return Strict(tokenizer, package(family, tokenizer), _RULES)


def _qwen38(*, enable_thinking: bool = True, **options: Any) -> Family:
    return _successor(
        "38",
        enable_thinking=enable_thinking,
        models=("Qwen/Qwen3.8-27B", "Qwen/Qwen3.8-Flash-Next")
        if enable_thinking and not options
        else (),
        proof=Proof.TOY,
        ids=(None,) * len(_NAMES),
        note="tried over the vocabulary of Qwen3.6; text only; a system message only first",
        **options,
    )


QWEN: dict[str, Family] = {
    "qwen3": _qwen3(
        enable_thinking=True,
        models=(
            *(f"Qwen/Qwen3-{size}" for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")),
            *("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-235B-A22B"),
        ),
        note="the models of 2507 have templates of their own: use `template`",
    ),
    # The generation prompt carries an empty reasoning block.
    "qwen3-no-thinking": _qwen3(
        enable_thinking=False,
        models=(),
        note="the generation prompt carries an empty block, and so do the turns of a given "
        "history, from which the published template leaves it out",
    ),
    "qwen3.5": _successor(
        "35",
        models=tuple(
            f"Qwen/Qwen3.5-{size}" for size in ("4B", "9B", "35B-A3B", "122B-A10B", "397B-A17B")
        ),
    ),
    "qwen3.5-no-thinking": _successor(
        "35", enable_thinking=False, models=("Qwen/Qwen3.5-0.8B", "Qwen/Qwen3.5-2B")
    ),
    "qwen3.6": _successor("36", models=("Qwen/Qwen3.6-35B-A3B",)),
    "qwen3.6-no-thinking": _successor("36", enable_thinking=False),
    "qwen3.8": _qwen38(),
    "qwen3.8-low": _qwen38(reasoning_effort="low"),
    "qwen3.8-medium": _qwen38(reasoning_effort="medium"),
    "qwen3.8-no-thinking": _qwen38(enable_thinking=False),
}
