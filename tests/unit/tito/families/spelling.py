"""How the models of each family write a turn: reasoning, calls, the token that ends it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from worker.tito.families import FAMILIES

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Spelling:
    """A family's own writing, as text whose control strings are ids."""

    calls: Callable[[list[Call]], str]
    answer_end: str
    calls_end: str
    broken: dict[str, str]
    """Attempts that are none: what it shows -> the text of the calls."""
    opened: bool = False
    """The generation prompt opens the reasoning."""
    reasons: bool = True
    answer: str = ""
    """Header of an answer, where there is one."""
    think: tuple[str, str] = ("<think>", "</think>")

    def turn(
        self, *, reasoning: str = "", content: str = "", calls: list[Call] | None = None
    ) -> str:
        """Return a whole turn, its end included."""
        text = ""
        if self.reasons and (reasoning or self.opened):
            text = ("" if self.opened else self.think[0]) + reasoning + self.think[1]
        if content:
            text += self.answer + content
        if not calls:
            return text + self.answer_end
        if content and self.answer:
            text += "<|end|><|start|>assistant"
        return text + self.calls(calls) + self.calls_end


def _deepseek(calls: list[Call]) -> str:
    body = "".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{body}<｜tool▁calls▁end｜>"


def _dsml(calls: list[Call]) -> str:
    body = "".join(
        f'<｜DSML｜invoke name="{name}">\n'
        + "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{value if isinstance(value, str) else _json(value)}</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
        + "</｜DSML｜invoke>\n"
        for name, arguments in calls
    )
    return f"\n\n<｜DSML｜tool_calls>\n{body}</｜DSML｜tool_calls>"


def _glm(calls: list[Call]) -> str:
    return "".join(
        f"<tool_call>{name}\n"
        + "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_text(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        + "</tool_call>"
        for name, arguments in calls
    )


def _llama(calls: list[Call]) -> str:
    return "".join(
        f'{{"name": "{name}", "parameters": {_json(arguments)}}}' for name, arguments in calls
    )


def _gpt_oss(calls: list[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"
        for name, arguments in calls
    )


def _kimi(calls: list[Call]) -> str:
    body = "".join(
        f"<|tool_call_begin|>functions.{name}:{place}<|tool_call_argument_begin|>"
        f"{_json(arguments)}<|tool_call_end|>"
        for place, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{body}<|tool_calls_section_end|>"


def _minimax(calls: list[Call]) -> str:
    body = "".join(
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{key}">{_text(value)}</parameter>\n'
            for key, value in arguments.items()
        )
        + "</invoke>\n"
        for name, arguments in calls
    )
    return f"<minimax:tool_call>\n{body}</minimax:tool_call>"


def _xml(calls: list[Call]) -> str:
    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{_text(value)}\n</parameter>\n" for key, value in arguments.items()
        )
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


def _block(calls: list[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'
        for name, arguments in calls
    )


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


_EOS = "<｜end▁of▁sentence｜>"
_JSON_BROKEN = '{"word": "né"'
_DEEPSEEK = {
    "no end": _deepseek([("look", {"word": "né"})]).partition("<｜tool▁call▁end｜>")[0],
    "no JSON": _deepseek([("look", {"word": "né"})]).replace('né"}', 'né"'),
    "no call": "<｜tool▁calls▁begin｜>look<｜tool▁calls▁end｜>",
    "no name": _deepseek([("", {"word": "né"})]),
    "one name twice": _deepseek([("look", {"a": 1, "b": 2})]).replace('"b"', '"a"'),
}
_DSML = {
    "no end": _dsml([("look", {"word": "né"})]).partition("</｜DSML｜invoke>")[0],
    "no call": "\n\n<｜DSML｜tool_calls>\nlook\n</｜DSML｜tool_calls>",
    "no parameter end": _dsml([("look", {"word": "né"})]).replace("</｜DSML｜parameter>", ""),
    "no JSON": _dsml([("look", {"word": 1})]).replace('"false">1', '"false">né'),
    "no name": _dsml([("", {})]),
    "one argument twice": _dsml([("look", {"a": "1", "b": "2"})]).replace('"b"', '"a"'),
}
_GLM = {
    "no end": _glm([("look", {"word": "né"})]).partition("</tool_call>")[0],
    "no value end": _glm([("look", {"word": "né"})]).replace("</arg_value>", ""),
    "no name": _glm([("", {"word": "né"})]),
    "only a value": "<tool_call>look<arg_value>né</arg_value></tool_call>",
    "no key": _glm([("look", {"a": "1"})]).replace(
        "</tool_call>", "<arg_value>2</arg_value></tool_call>"
    ),
    "two keys": _glm([("look", {"a": "1"})]).replace(
        "<arg_value>", "<arg_key>b</arg_key><arg_value>"
    ),
    "a piece left over": _glm([("look", {"a": "1"})]).replace("</arg_key>", "</arg_key>and"),
    "one argument twice": _glm([("look", {"a": "1", "b": "2"})]).replace(">b<", ">a<"),
}
_KIMI = {
    "no end": _kimi([("look", {"word": "né"})]).partition("<|tool_call_end|>")[0],
    "no JSON": _kimi([("look", {"word": "né"})]).replace('né"}', 'né"'),
    "no call": "<|tool_calls_section_begin|>look<|tool_calls_section_end|>",
    "no arguments": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "no name": _kimi([("", {"word": "né"})]),
    "one name twice": _kimi([("look", {"a": 1, "b": 2})]).replace('"b"', '"a"'),
}
_MINIMAX = {
    "no end": _minimax([("look", {"word": "né"})]).partition("</minimax:tool_call>")[0],
    "no call": "<minimax:tool_call>look</minimax:tool_call>",
    "no invoke end": _minimax([("look", {"word": "né"})]).replace("</invoke>", ""),
    "no parameter end": _minimax([("look", {"word": "né"})]).replace("</parameter>", ""),
}
_XML = {
    "no end": _xml([("look", {"word": "né"})]).partition("</tool_call>")[0],
    "no function": "<tool_call>\nlook\n</tool_call>",
    "no parameter end": _xml([("look", {"word": "né"})]).replace("</parameter>", ""),
}
_QWEN3 = {
    "no end": _block([("look", {"word": "né"})]).partition("</tool_call>")[0],
    "no JSON": _block([("look", {"word": "né"})]).replace("né", 'n"é'),
    "no name": '<tool_call>\n{"arguments": {}}\n</tool_call>',
}
_LLAMA = {
    "no JSON": _llama([("look", {"word": "né"})])[:-1],
    "two calls": _llama([("look", {}), ("look", {})]),
    "no object": '{"name": "look", "parameters": [1]}',
    "one name twice": _llama([("look", {"a": 1, "b": 2})]).replace('"b"', '"a"'),
}
_GPT_OSS = {
    "no JSON": "<|channel|>commentary to=functions.look<|message|>" + _JSON_BROKEN,
    "no object": "<|channel|>commentary to=functions.look<|message|>[1]",
    "one name twice": _gpt_oss([("look", {"a": 1, "b": 2})]).replace('"b"', '"a"'),
    "no function": '<|channel|>commentary to=browser.open<|message|>{"id": 1}',
    "no name": '<|channel|>commentary to=functions.<|message|>{"id": 1}',
}

_DEEPSEEK_V3 = Spelling(_deepseek, _EOS, _EOS, _DEEPSEEK, reasons=False)
_V4 = Spelling(_dsml, _EOS, _EOS, _DSML, reasons=False)
_GLM_45 = Spelling(_glm, "<|user|>", "<|observation|>", _GLM)
_GLM_5 = Spelling(_glm, "<|user|>", "<|observation|>", _GLM, opened=True)
_GLM_PLAIN = Spelling(_glm, "<|user|>", "<|observation|>", _GLM, reasons=False)
_HARMONY = Spelling(
    _gpt_oss,
    "<|return|>",
    "<|call|>",
    _GPT_OSS,
    answer="<|channel|>final<|message|>",
    think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
)
_IM_END = "<|im_end|>"

SPELLINGS: dict[str, Spelling] = {
    "deepseek-v3": _DEEPSEEK_V3,
    "deepseek-r1": Spelling(_deepseek, _EOS, _EOS, _DEEPSEEK, opened=True),
    "deepseek-v4": _V4,
    "deepseek-v4-thinking": Spelling(_dsml, _EOS, _EOS, _DSML, opened=True),
    "glm-4.5": _GLM_45,
    "glm-4.5-no-thinking": _GLM_PLAIN,
    "glm-5": _GLM_5,
    "glm-5-no-thinking": _GLM_PLAIN,
    "glm-5.1": _GLM_5,
    "glm-5.3": _GLM_5,
    "gpt-oss": _HARMONY,
    "kimi-k2": Spelling(_kimi, _IM_END, _IM_END, _KIMI, reasons=False),
    "kimi-k2.5": Spelling(_kimi, _IM_END, _IM_END, _KIMI, opened=True),
    "kimi-k2.5-no-thinking": Spelling(_kimi, _IM_END, _IM_END, _KIMI, reasons=False),
    "llama-3": Spelling(_llama, "<|eot_id|>", "<|eot_id|>", _LLAMA, reasons=False),
    "minimax-m2": Spelling(_minimax, "[e~[", "[e~[", _MINIMAX, opened=True),
    "nemotron-3": Spelling(_xml, _IM_END, _IM_END, _XML, opened=True),
    "nemotron-3-no-thinking": Spelling(_xml, _IM_END, _IM_END, _XML, reasons=False),
    "nemotron-3-ultra": Spelling(_xml, _IM_END, _IM_END, _XML, opened=True),
    "nemotron-3.5": Spelling(_xml, _IM_END, _IM_END, _XML, opened=True),
    "qwen3.5": Spelling(_xml, _IM_END, _IM_END, _XML, opened=True),
    "qwen3.5-no-thinking": Spelling(_xml, _IM_END, _IM_END, _XML, reasons=False),
    "qwen3.6": Spelling(_xml, _IM_END, _IM_END, _XML, opened=True),
    "qwen3.8": Spelling(_xml, _IM_END, _IM_END, _XML, opened=True),
    "qwen3": Spelling(_block, _IM_END, _IM_END, _QWEN3),
    "qwen3-no-thinking": Spelling(_block, _IM_END, _IM_END, _QWEN3, reasons=False),
}

NAMES = [name for name in FAMILIES if name in SPELLINGS]
SAME_AS = {
    "gpt-oss-low": "gpt-oss", "gpt-oss-high": "gpt-oss", "qwen3.6-no-thinking": "qwen3.6",
    "qwen3.8-low": "qwen3.8", "qwen3.8-medium": "qwen3.8", "qwen3.8-no-thinking": "qwen3.8",
}  # fmt: skip
"""Families that differ from another one by a word of the system message or a closed block; only
the self-test tries them."""
