"""Qwen3: what its vocabulary and its template fix.

Owns data only. The ids are those of every published Qwen3 vocabulary (text models); they were
checked against it by the golden tests.
"""

from __future__ import annotations

from .family import Family, Proof

_TOKENS: dict[str, int | None] = {
    "<|endoftext|>": 151643,
    "<|im_start|>": 151644,
    "<|im_end|>": 151645,
    "<tool_call>": 151657,
    "</tool_call>": 151658,
    "<tool_response>": 151665,
    "</tool_response>": 151666,
    "<think>": 151667,
    "</think>": 151668,
}
_SCAFFOLD = ("\n", "user", "user\n", "assistant\n", "<|im_start|>assistant\n")


def _qwen3(*, enable_thinking: bool) -> Family:
    return Family(
        module="qwen3",
        renderer="Qwen3Renderer",
        config="Qwen3RendererConfig",
        close="<|im_end|>",
        tokens=_TOKENS,
        scaffold=_SCAFFOLD,
        # "all": earlier reasoning stays where the engine saw it, so that a user message can follow.
        options={"enable_thinking": enable_thinking, "thinking_retention": "all"},
        reasoning=("<think>", "</think>"),
        markup=("<tool_call>", "</tool_call>"),
        thinking=enable_thinking,
        proof=Proof.VERIFIED,
    )


QWEN: dict[str, Family] = {
    "qwen3": _qwen3(enable_thinking=True),
    # The generation prompt carries an empty reasoning block.
    "qwen3-no-thinking": _qwen3(enable_thinking=False),
}
