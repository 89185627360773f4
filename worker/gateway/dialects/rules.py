"""What becomes of every parameter that a client may send: one rule for all dialects.

Owns the tables of names and the few functions that apply them. Never translates a message, never
does I/O, never looks at the value of what is not used. Invariant: a name of a table ends as that
table says, whatever else the request holds; a name of no table is ignored, and said to be.

    PINNED     would change the distribution that is trained on: accepted, not used, named in the
               reply's header `x-rollstream-pinned`
    REFUSED    would change the form of the prompt or of the reply: 400, unless the value asks for
               what happens anyway
    LOWERED    the cap of a reply: the client may lower it and nothing else
    USED       does what it says; the dialect reads it
    NO_EFFECT  says nothing about prompt or reply (bookkeeping, prices, caches): accepted silently

null is always the same as absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

from rollstream.sample import Message

from ..types import ErrorKind, Refusal

MAX_KEY_CHARS = 256
"""Longer idempotency keys are cut: what is kept of a request is bounded."""
MAX_IGNORED = 32
"""Unknown names of one request that are told of; longer lists are noise."""


class Fate(StrEnum):
    """What becomes of a parameter."""

    PINNED = "pinned"
    REFUSED = "refused"
    LOWERED = "lowered"
    USED = "used"
    NO_EFFECT = "no effect"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of a dialect's table."""

    fate: Fate
    note: str = ""
    """Of a refused one: why, and what to do instead; of others what a reader should know."""
    allows: Callable[[Any], bool] | None = None
    """Of a refused one: values that ask for nothing special. None allows only null."""
    allowed: str = ""
    """The same in words, for errors and docs."""


Table: TypeAlias = Mapping[str, Rule]


def pinned(names: str, note: str = "") -> dict[str, Rule]:
    """Return rows for names, given as words of one string."""
    return dict.fromkeys(names.split(), Rule(Fate.PINNED, note))


def used(names: str, note: str = "") -> dict[str, Rule]:
    """Return rows for names that the dialect reads."""
    return dict.fromkeys(names.split(), Rule(Fate.USED, note))


def lowered(names: str, note: str = "") -> dict[str, Rule]:
    """Return rows for caps."""
    return dict.fromkeys(names.split(), Rule(Fate.LOWERED, note))


def no_effect(names: str, note: str = "") -> dict[str, Rule]:
    """Return rows for names that say nothing about prompt or reply."""
    return dict.fromkeys(names.split(), Rule(Fate.NO_EFFECT, note))


def refused(
    names: str, note: str, allows: Callable[[Any], bool] | None = None, allowed: str = ""
) -> dict[str, Rule]:
    """Return rows for names that are answered with 400.

    Args:
        names: words of one string.
        note: why, and what to do.
        allows: values that are accepted all the same.
        allowed: those in words.
    """
    return dict.fromkeys(names.split(), Rule(Fate.REFUSED, note, allows, allowed))


def is_one(value: Any) -> bool:
    """Return whether a count is 1."""
    return value == 1 and not isinstance(value, bool)


def is_zero(value: Any) -> bool:
    """Return whether a count is 0 or a switch is off."""
    return value is False or (value == 0 and not isinstance(value, bool))


def is_off(value: Any) -> bool:
    """Return whether a switch is off."""
    return value is False


def is_on(value: Any) -> bool:
    """Return whether a switch is on."""
    return value is True


def is_empty(value: Any) -> bool:
    """Return whether it is an empty list, object or text."""
    return isinstance(value, list | dict | str) and not value


def is_text_format(value: Any) -> bool:
    """Return whether a response format is plain text."""
    return isinstance(value, Mapping) and value.get("type") == "text"


_GRAMMAR = "replies are sampled without a grammar; say in the prompt which form you want"
_PROMPT = "the prompt is what the run's chat format makes of the messages"
_ONE = "a session is one line of replies; send the request again for another one"

EVERYWHERE: Table = {
    **pinned(
        "temperature top_p top_k min_p typical_p top_a frequency_penalty presence_penalty "
        "repetition_penalty length_penalty seed sampling_seed stop stop_token_ids bad_words "
        "allowed_token_ids logit_bias min_tokens min_new_tokens ignore_eos no_stop_trim "
        "skip_special_tokens include_stop_str_in_output logits_processors custom_logit_processor "
        "use_beam_search",
        "the run's own value is sampled with",
    ),
    **pinned(
        "reasoning_effort verbosity thinking reasoning", "the run's chat format says how much"
    ),
    **refused("n best_of", _ONE, is_one, "1"),
    **refused(
        "response_format", _GRAMMAR, is_text_format, '{"type": "text"}'
    ),
    **refused(
        "guided_json guided_regex guided_choice guided_grammar structured_outputs json_schema "
        "regex ebnf structural_tag",
        _GRAMMAR, is_empty, "empty",
    ),
    **refused("top_logprobs", "only sampled tokens have log-probs", is_zero, "0"),
    **refused("chat_template_kwargs", _PROMPT, is_empty, "{}"),
    **refused("chat_template documents", _PROMPT, is_empty, "empty"),
    **refused(
        "input_ids prompt_token_ids prompt prompt_embeds input_embeds",
        "ids are made here, from the messages; send messages",
    ),
    **refused("truncate_prompt_tokens", "prompts are never cut"),
    **refused("add_special_tokens continue_final_message echo", _PROMPT, is_off, "false"),
    **refused("add_generation_prompt", _PROMPT, is_on, "true"),
    **refused(
        "return_token_ids return_tokens_as_token_ids",
        "ids are in the sample, not in replies; ask for logprobs to count them", is_off, "false",
    ),
    **refused("separate_reasoning", "reasoning is always apart", is_on, "true"),
    **refused("prediction", "nothing is predicted here; leave it out"),
}  # fmt: skip
"""What engines and SDKs send in every dialect; a dialect's own table goes over it."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """What a request's fields came to."""

    pinned: tuple[str, ...]
    ignored: tuple[str, ...]


def sort_fields(body: Mapping[str, Any], table: Table) -> Sorted:
    """Apply a table to the top level of a request.

    Args:
        body: the request.
        table: of the dialect, with `EVERYWHERE` in it.

    Raises:
        Refusal: a refused field with a value that it may not have; says which, why, what to do.
    """
    asked, ignored = [], []
    for name, value in body.items():
        if value is None:
            continue
        rule = table.get(name)
        if rule is None:
            ignored.append(name)
        elif rule.fate is Fate.PINNED:
            if not is_empty(value):
                asked.append(name)
        elif rule.fate is Fate.REFUSED and not (rule.allows and rule.allows(value)):
            what = f"may only be {rule.allowed} or left out" if rule.allowed else "is not supported"
            raise Refusal(ErrorKind.INVALID, f"{name} {what}: {rule.note}", param=name)
    return Sorted(tuple(asked), tuple(name[:64] for name in ignored[:MAX_IGNORED]))


def cap(body: Mapping[str, Any], *names: str) -> int | None:
    """Return the cap of a reply that a client asked for; None for none.

    Args:
        body: the request.
        names: the newest first: the first that is given wins, and every one that is must be good.

    Raises:
        Refusal: it is no whole number, or less than 1.
    """
    found = None
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refusal(
                ErrorKind.INVALID,
                f"{name} is {value!r:.40}: a whole number of at least 1 (it may lower the run's "
                "cap and never raises it)",
                param=name,
            )
        found = value if found is None else found
    return found


def switch(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a field that is true or false.

    Raises:
        Refusal: it is neither.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Refusal(ErrorKind.INVALID, f"{name} is {value!r:.40}: true or false", param=name)
    return value


def text(body: Mapping[str, Any], name: str, default: str = "") -> str:
    """Return a field that is text.

    Raises:
        Refusal: it is something else.
    """
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, str):
        raise Refusal(ErrorKind.INVALID, f"{name} is {value!r:.40}: expected text", param=name)
    return value


def retry_of(headers: Mapping[str, str]) -> tuple[int, str]:
    """Return how often an SDK sent this before, and its key for all tries of one request.

    Args:
        headers: of the request, names in lower case. A count that is no number is none.
    """
    count = headers.get("x-stainless-retry-count", "").strip()
    retry = int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0
    return retry, headers.get("idempotency-key", "").strip()[:MAX_KEY_CHARS]


def function_tools(given: Any, param: str = "tools") -> tuple[list[Message] | None, bool]:
    """Return tools in OpenAI's form, and whether one asks for strict arguments.

    The flat form of the Responses API (`{"type": "function", "name": …}`) gets its `function`.
    What a tool says besides stays as it is: the model reads it. No tools and an empty list are one.

    Args:
        given: the field of a request.
        param: its name, for errors.

    Raises:
        Refusal: an entry that is no function; says its index.
    """
    if given is None or given == []:
        return None, False
    if not isinstance(given, list):
        raise Refusal(ErrorKind.INVALID, f"{param}: a list of tools", param=param)
    tools = [_function_tool(tool, f"{param}[{place}]") for place, tool in enumerate(given)]
    return tools, any(tool["function"].get("strict") is True for tool in tools)


def _function_tool(tool: Any, where: str) -> Message:
    kind = tool.get("type", "function") if isinstance(tool, dict) else None
    if kind != "function":
        what = f"type {kind!r:.40}" if kind is not None else "no object"
        raise Refusal(
            ErrorKind.INVALID,
            f"{where} is of {what}: only functions are tools here "
            '({"type": "function", "function": {"name": …, "parameters": …}})',
            param=where,
        )
    function = tool.get("function")
    if function is None and "name" in tool:
        function = {key: value for key, value in tool.items() if key != "type"}
        tool = {"type": "function", "function": function}
    if not isinstance(function, dict):
        raise Refusal(
            ErrorKind.INVALID, f"{where}.function: an object with name and parameters", param=where
        )
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name:
        raise Refusal(ErrorKind.INVALID, f"{where}.function.name: a name", param=where)
    if parameters is not None and not isinstance(parameters, dict):
        raise Refusal(
            ErrorKind.INVALID,
            f"{where}.function.parameters: an object (a JSON schema)",
            param=where,
        )
    return tool if "type" in tool else {"type": "function", **tool}


def forced_choice(choice: str) -> Refusal:
    """Return the refusal of a tool choice that forces a call."""
    return Refusal(
        ErrorKind.INVALID,
        f"tool_choice {choice}: calls are never forced, since the model samples freely; "
        'use "auto", or "none" to have calls as text',
        param="tool_choice",
    )


def names_of(table: Table, fate: Fate) -> Iterable[str]:
    """Return the names of a table that end so, in its order: docs are made of it."""
    return (name for name, rule in table.items() if rule.fate is fate)
