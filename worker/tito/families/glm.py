"""GLM 4.5 to 5.3: what their vocabularies and templates fix.

Owns data, and which renderer reads it. The next message's role token closes an assistant turn, and
engines stop on it, so that it is sampled and not written a second time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .family import CallForm, Family, Proof
from .strict import Rules, Strict, package

_END = "<|endoftext|>"
_TURNS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", _END)
_THINK = ("<think>", "</think>")
_CALL = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_RESPONSE = ("<tool_response>", "</tool_response>")
_RULES = Rules(
    stand_in=_END, reasoning=_THINK, attempt="<tool_call>", behind_closer=True, tagged=True
)


class _Glm(Strict):
    def _judge(self, call: Any, ids: list[int]) -> None:
        # The package leaves out what stands between arguments, and gives the first of two keys
        # the value of the second.
        start, end = call.token_span
        marks = [self._tokenizer.token_id(mark) for mark in _CALL[2:]]
        block = ids[start + 1 : end - 1]
        found = [(place, number) for place, number in enumerate(block) if number in marks]
        whole = [number for _, number in found] == marks * (len(found) // 4)
        between = [
            self._tokenizer.decode(block[place + 1 : following])
            for (place, number), following in zip(
                found, [*(place for place, _ in found[1:]), len(block)], strict=True
            )
            if number in (marks[1], marks[3])
        ]
        if (
            not whole
            or any(text.strip() for text in between)
            or (len(call.arguments) != len(found) // 4)
        ):
            call.status = "malformed_structure"


class _Glm45(_Glm):
    def render_ids(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        ids = super().render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        # The published template begins every call with a newline; the package leaves it out between
        # two calls that follow a text.
        begin, end = (self._tokenizer.token_id(mark) for mark in _CALL[:2])
        newline = self._tokenizer.encode("\n")
        whole: list[int] = []
        for number in ids:
            if number == begin and whole and whole[-1] == end:
                whole += newline
            whole.append(number)
        return whole


def _glm(tokenizer: Any, family: Family) -> Strict:
    # Without thinking the package's parser begins behind the reasoning, and knows no markers.
    rules = replace(_RULES, behind_closer=family.thinking)
    kind = _Glm45 if family.module == "glm45" else _Glm
    return kind(tokenizer, package(family, tokenizer), rules)


def _family(
    module: str,
    renderer: str,
    models: tuple[str, ...],
    note: str = "",
    tokens: tuple[str, ...] = _RESPONSE,
    *,
    thinking: bool = True,
    opens_reasoning: bool = False,
    **options: Any,
) -> Family:
    return Family(
        module=module,
        renderer=f"{renderer}Renderer",
        config=f"{renderer}RendererConfig",
        build=_glm,
        close="",
        closes=("<|user|>", "<|observation|>", _END),
        stand_in=_END,
        tokens=dict.fromkeys((*_TURNS, *_THINK, *_CALL, *tokens)),
        options={"thinking_retention": "all", **options},
        thinking=thinking,
        opens_reasoning=opens_reasoning,
        reasoning=_THINK,
        call_form=CallForm.PARSED,
        markup=_CALL,
        models=models,
        proof=Proof.TOY,
        note=note,
    )


_AIR = ("zai-org/GLM-4.5-Air", "THUDM/GLM-4.5-Air")
_FIVE = ("zai-org/GLM-5", "zai-org/GLM-5-FP8", "zai-org/GLM-4.7-Flash")

GLM: dict[str, Family] = {
    "glm-4.5": _family(
        "glm45", "GLM45", _AIR, "a given history loses reasoning before its last user message", ()
    ),
    "glm-4.5-no-thinking": _family(
        "glm45", "GLM45", (), tokens=(), thinking=False, enable_thinking=False
    ),
    "glm-5": _family("glm5", "GLM5", _FIVE, opens_reasoning=True, clear_thinking=False),
    "glm-5-no-thinking": _family(
        "glm5", "GLM5", (), thinking=False, clear_thinking=False, enable_thinking=False
    ),
    "glm-5.1": _family("glm5", "GLM51", ("zai-org/GLM-5.1",), clear_thinking=False),
    "glm-5.3": _family(
        "glm5",
        "GLM53",
        ("zai-org/GLM-5.3", "zai-org/GLM-5.3-BF16"),
        "the system message says the highest reasoning effort",
        clear_thinking=False,
    ),
}
