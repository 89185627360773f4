"""Tool calls as the model wrote them: the one place that says what may be executed.

Owns the policy, the same for every family and every backend: a call is executed only where it can
be read in one way, as a name and an object of arguments; everything else is a problem that is
recorded and that the model can read and answer. Never executes, never raises for what a model
wrote, never repairs: strict JSON, no guessed quotes or commas, no lost pieces. Invariant: every
attempt of the model is one `ToolCall`, in order; none is dropped in silence.

    written                                     becomes
    an object with name and arguments           a call
    no arguments, "", the object in a string    a call (at most `MAX_UNWRAPS` strings deep)
    raw control characters, bad escapes, NaN,   `invalid_json`; the text says where
      two objects between the markers, a name
      twice, a number beyond a float, half of
      a surrogate pair
    no closing marker                           `unclosed`, however complete it looks
    no name, or none that is text               `no_name`
    more calls than a turn may make             `too_many`, each but the first ones
    null, a list, a number, other text          `bad_arguments`
    a format of tags with a piece missing or    `bad_structure`
      left over
"""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.sample import Message

from ..types import ProblemKind, ToolCall

MAX_LATER_CLOSES = 8
"""So many closing markers inside one block's strings are looked beyond."""
MAX_UNWRAPS = 3
"""Arguments may be JSON in a string, in a string, …, this many times."""
MAX_ID_CHARS = 64
"""A call's own id, where the format carries one, is kept up to this length."""

_FORM = 'write {"name": <function name>, "arguments": {<name>: <value>, …}}'
_TAGS = "write the call again, each argument between its two markers"
_SAFE_ID = re.compile(r"[\w.:\-]+")
_TAGGED = (
    # (how such a block begins, how an argument of it does, what a block without arguments is)
    (
        "<function=",
        re.compile(r"<parameter=([^>\n]+)>"),
        re.compile(r"<function=[^>\n]+>\s*(?:</function>)?"),
    ),
    (
        "<invoke ",
        re.compile(r'<parameter name="([^"\n]+)">'),
        re.compile(r'(?:<invoke name="[^"\n]+">\s*</invoke>\s*)+'),
    ),
)
_ARGUMENT_END = "</parameter>"
_TEXTS = (
    ("<function=", _TAGGED[0][1], _ARGUMENT_END),
    ("<arg_key>", re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>"), "</arg_value>"),
)


def judge_call(raw: str, *, closed: bool) -> ToolCall:
    """Return the call that a block of JSON spells.

    Args:
        raw: the text between the markers.
        closed: whether the closing marker came.
    """
    call = ToolCall(id=new_call_id(), name="", arguments={}, raw=raw)
    if not closed:
        return _problem(call, ProblemKind.UNCLOSED, f"the tool call was not closed; {_FORM}")
    try:
        parsed = strict_json(raw)
    except (ValueError, RecursionError) as error:
        return _problem(call, ProblemKind.INVALID_JSON, f"not valid JSON ({error}); {_FORM}")
    if not isinstance(parsed, dict):
        return _problem(call, ProblemKind.INVALID_JSON, f"not a JSON object; {_FORM}")
    return _judged(call, parsed.get("name"), parsed.get("arguments", {}), _FORM)


def judge_parsed(
    raw: str,
    *,
    name: str | None,
    arguments: Any,
    status: str = "ok",
    call_id: str | None = None,
    tools: Sequence[Message] | None = None,
) -> ToolCall:
    """Return the call that a family's own parser found.

    What a parser calls valid is judged again: some take the first of two functions in one block,
    or leave out an argument whose end marker is missing. An argument that is no JSON is no
    problem here: where the tool's schema wants a number, its check says so to the model.

    Args:
        raw: the text of the block.
        name: of the function, as far as it was found.
        arguments: an object, or the text that should be one.
        status: the parser's word, of `renderers.base.ToolCallParseStatus`; an unknown tool is
            none of its matters (the worker lists the known ones to the model).
        call_id: the format's own id of the call, which its template shows again.
        tools: where the parser was not given them: arguments of a format of tags that the tool
            wants as text are then that text, not the JSON that it may look like.
    """
    call = ToolCall(id=_own_id(call_id), name="", arguments={}, raw=raw)
    if isinstance(name, str):
        call.name = name
    if status == "unclosed_block":
        return _problem(call, ProblemKind.UNCLOSED, "the tool call was not closed; write it again")
    if status == "malformed_structure":
        return _problem(call, ProblemKind.BAD_STRUCTURE, f"the tool call is incomplete; {_TAGS}")
    if status == "invalid_json" and not isinstance(arguments, dict):
        return _problem(call, ProblemKind.INVALID_JSON, _why_no_json(arguments))
    wrong = _debris(raw, name)
    if wrong:
        return _problem(call, ProblemKind.BAD_STRUCTURE, f"{wrong}; {_TAGS}")
    given = {} if arguments is None and status in ("ok", "unknown_tool") else arguments
    if tools and isinstance(given, dict):
        given = given | _texts_wanted(raw, name, given, tools)
    try:
        json.dumps(given, allow_nan=False)
        _strict_at(raw, given)
    except (ValueError, TypeError, RecursionError) as error:
        return _problem(call, ProblemKind.INVALID_JSON, f"not valid JSON ({error}); write it again")
    return _judged(call, name, given, "write a function name and an object of arguments")


def limit_calls(calls: Sequence[ToolCall], most: int | None) -> None:
    """Make problems of the executable calls of one turn behind the first `most`.

    Args:
        calls: of one turn, in order; malformed ones do not count.
        most: None is no limit.
    """
    if most is None:
        return
    good = [call for call in calls if call.problem is None]
    for call in good[most:]:
        _problem(
            call,
            ProblemKind.TOO_MANY,
            f"not executed: {len(good)} calls in one turn, at most {most} are run; "
            "write it again in the next turn",
        )


def strict_json(text: str) -> Any:
    """Return what a JSON text says, read in the only way that it can be.

    Raises:
        ValueError: no JSON, more than one value, a number that no float holds, or an object with
            one name twice (of which a lenient reader takes the last).
        RecursionError: brackets of thousands of levels.
    """
    try:
        return _STRICT.decode(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise ValueError(
                f"Extra data behind character {error.pos}: one object in each call, no more"
            ) from None
        raise


def closes_behind(ids: list[int], start: int, marker: int) -> list[int]:
    """Return the first places of `marker` in `ids` from `start` on, at most `MAX_LATER_CLOSES`."""
    places: list[int] = []
    while len(places) < MAX_LATER_CLOSES:
        try:
            places.append(ids.index(marker, places[-1] + 1 if places else start))
        except ValueError:
            break
    return places


def unwrap_arguments(arguments: Any) -> Any:
    """Return `arguments` freed of at most `MAX_UNWRAPS` layers of JSON in a string.

    The empty string is an empty object; a string that is no JSON comes back as it is.
    """
    for _ in range(MAX_UNWRAPS):
        if not isinstance(arguments, str):
            break
        if not arguments.strip():
            return {}
        try:
            arguments = strict_json(arguments)
        except (ValueError, RecursionError):
            break
    return arguments


def new_call_id() -> str:
    """Return an id that repeats in no turn: formats such as Qwen3's carry none."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _judged(call: ToolCall, name: Any, arguments: Any, form: str) -> ToolCall:
    if not isinstance(name, str) or not name.strip():
        return _problem(call, ProblemKind.NO_NAME, f"the tool call has no name; {form}")
    call.name = name
    unwrapped = unwrap_arguments(arguments)
    if not _is_text(name, unwrapped):
        return _problem(
            call, ProblemKind.INVALID_JSON, f"half of a surrogate pair is no character; {form}"
        )
    if not isinstance(unwrapped, dict):
        kind = "null" if unwrapped is None else type(unwrapped).__name__
        return _problem(
            call, ProblemKind.BAD_ARGUMENTS, f"arguments must be a JSON object, not {kind}; {form}"
        )
    call.arguments = unwrapped
    return call


def _is_text(*values: Any) -> bool:
    """Return whether all strings in JSON values can be sent; half of a surrogate pair cannot."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    except (TypeError, RecursionError):
        return True  # not what is asked here
    return True


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"{json.dumps(name[:40])} is there twice in one object")
            seen.add(name)
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is out of range")
    return number


def _strict_at(raw: str, arguments: Any) -> None:
    """Raise where an object that a parser read loosely holds one name twice."""
    start = raw.find("{") if arguments and isinstance(arguments, dict) else -1
    if start >= 0 and not raw.lstrip().startswith("<"):
        try:
            _STRICT.raw_decode(raw, start)
        except json.JSONDecodeError:
            return  # the brace was not the object's


def _why_no_json(arguments: Any) -> str:
    try:
        strict_json(arguments if isinstance(arguments, str) else "")
    except (ValueError, RecursionError) as error:
        return f"the arguments are not valid JSON ({error}); write one object"
    return "the arguments are not valid JSON; write one object"


def _debris(raw: str, name: str | None) -> str:
    """Return what is wrong with a block of tags that a lenient parser took, empty for nothing."""
    block = raw.strip()
    for begins, argument, without in _TAGGED:
        if not block.startswith(begins):
            continue
        rest, found = _arguments_out_of(block, argument)
        names = [name for name, _ in found]
        if not without.fullmatch(rest.strip()):
            return "the tool call has a piece that belongs to no argument"
        if begins == "<function=" and len(set(names)) != len(names):
            return "the tool call has one argument twice"
        return ""
    if "<arg_key>" in block:
        _, argument, closer = _TEXTS[1]
        rest, found = _arguments_out_of(block, argument, closer)
        if rest.strip() != (name or "").strip():
            return "the tool call has a piece that belongs to no argument"
        if len({key for key, _ in found}) != len(found):
            return "the tool call has one argument twice"
    return ""


def _arguments_out_of(
    block: str, argument: re.Pattern[str], closer: str = _ARGUMENT_END
) -> tuple[str, list[tuple[str, str]]]:
    """Return a block without its arguments, and these; linear whatever was written."""
    rest: list[str] = []
    arguments: list[tuple[str, str]] = []
    at = 0
    while found := argument.search(block, at):
        end = block.find(closer, found.end())
        if end < 0:
            break
        rest.append(block[at : found.start()])
        arguments.append((found[1].strip(), block[found.end() : end].strip()))
        at = end + len(closer)
    return "".join([*rest, block[at:]]), arguments


def _texts_wanted(
    raw: str, name: str | None, given: Mapping[str, Any], tools: Sequence[Message]
) -> dict[str, str]:
    """Return those arguments of a block of tags that the tool's schema wants as text."""
    wanted = {
        key
        for tool in tools
        if (function := tool.get("function", tool)).get("name") == name
        for key, schema in ((function.get("parameters") or {}).get("properties") or {}).items()
        if isinstance(schema, dict) and schema.get("type") in ("string", ["string"])
    }
    for begin, argument, closer in _TEXTS:
        if begin in raw:
            _, found = _arguments_out_of(raw, argument, closer)
            return {key: text for key, text in found if key in wanted and key in given}
    return {}


_STRICT = json.JSONDecoder(
    object_pairs_hook=_object, parse_constant=_no_constant, parse_float=_finite
)


def _own_id(given: str | None) -> str:
    if given and len(given) <= MAX_ID_CHARS and _SAFE_ID.fullmatch(given):
        return given
    return new_call_id()


def _problem(call: ToolCall, kind: ProblemKind, text: str) -> ToolCall:
    call.problem, call.problem_text = kind, text
    return call
