"""One chat template, compiled with the settings of Hugging Face's libraries, in a sandbox.

Owns what a template may see and what it may cost. Never reads a file, never tokenizes. Imports
jinja2, so it is imported only where a template is used. Invariant: a render gives the text that
`apply_chat_template` gives for the same messages, or a `RenderError`; nothing that a template does
reaches a file, the network, the clock or another render.

A template comes with a model, from anybody. What is bounded: iterations of loops, calls and the
text that they make (`MAX_STEPS`); the length of all that is written, in blocks and macros too, and
of everything that an operator, a filter or a method makes, whatever it holds twice (`MAX_CHARS`,
`weights`); numbers, recursion. What is not: the time of one such operation on that much text. A
template that wants to be slow can cost some seconds and some hundred MB; it cannot run for ever.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, TypeAlias, TypeGuard, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from rollstream.errors import ConfigError

from .extras import Dict, Generation, Namespace
from .weights import Weights

MAX_STEPS = 10_000_000
"""Iterations of loops, calls, and items that filters go through, in one render: some seconds. A
template that looks at all messages at each of 1,000 takes a million."""
MAX_CHARS = 64_000_000
"""Of a render and of everything made on the way: more than any context holds."""
MAX_WIDTH = 100
"""Of what a filter or a method pads or indents to."""
MAX_SOURCE_CHARS = 1_000_000

_MAX_BITS = 4096
_CHARS_A_STEP = 16
_SHORT_CHARS = 256
"""Up to here a text costs what the call that makes it does."""
_LOOKS = frozenset(["length", "count", "first", "last", "default", "d", "tojson", "string"])
"""Filters that do not go through their items, or are bounded by what they write."""
_PADDING = frozenset(
    ["center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson", "round", "to_bytes"]
)
_WIDE = re.compile(r"[0-9]{5}|%[^a-zA-Z%]*\*|\{[^{}]*\{")
"""A width of five digits, or one that is an argument."""


class RenderError(ValueError):
    """A template could not be rendered; the message is the template's own where it has one."""


class PlainTools:
    """Tool specs as templates see them, made once for all renders with them.

    Most templates write every spec as JSON; ten specs are most of what a render costs, so that
    text is kept. Templates cannot change what they are given.
    """

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        """Copy the specs."""
        self.data: list[Any] = plain_data(tools)
        self._known = {id(self.data)}
        for tool in self.data:
            self._known.update(id(part) for part in (tool, *tool.values()))
        self._texts: dict[tuple[int, str], str] = {}

    def to_json(self, value: Any, *args: Any, **kwargs: Any) -> str:
        """Return the JSON of `value`, from the last time where it is a spec."""
        if id(value) not in self._known:
            return to_json(value, *args, **kwargs)
        key = (id(value), repr((args, kwargs)))
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = to_json(value, *args, **kwargs)
        return text


class _Budget(threading.local):
    """What the render of this thread may still cost, and the tools it was given."""

    steps = 0
    written = 0
    tools: PlainTools | None = None
    weights: Weights


Specs: TypeAlias = list[dict[str, Any]] | PlainTools | None


class ChatTemplate:
    """A compiled template; `render` may be called from several threads."""

    def __init__(self, source: str, *, name: str = "chat template", date: str = "") -> None:
        """Compile.

        Args:
            source: Jinja.
            name: for messages.
            date: what `strftime_now` says, in ISO form; the same for the whole run.

        Raises:
            ConfigError: no Jinja, too long, or it wants to know today's date and none was given.
        """
        if len(source) > MAX_SOURCE_CHARS:
            raise ConfigError(f"{name}: {len(source)} characters are no chat template")
        self.name = name
        self.source = source
        self._budget = _Budget()
        self._environment = _environment(self._budget, _pinned(date, name))
        try:
            tree = self._environment.parse(source)
            self._check_clock(tree, date)
            code = self._environment.compile(_Bounds().visit(tree))
            self._template = jinja2.Template.from_code(
                self._environment, code, self._environment.make_globals(None)
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"{name}: line {error.lineno} is no Jinja: {error.message}") from None
        except (RecursionError, jinja2.TemplateError, SyntaxError, MemoryError) as error:
            raise ConfigError(f"{name}: cannot be compiled: {error}") from None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Specs,
        *,
        add_generation_prompt: bool,
        names: Mapping[str, Any],
    ) -> str:
        """Return the text.

        Args:
            messages: normalized; plain JSON types.
            tools: normalized specs, None for none; `PlainTools` where they are used again.
            add_generation_prompt: end with the header of an assistant turn.
            names: what else the template sees: special tokens, options.

        Raises:
            RenderError: the template raised, or cost too much.
        """
        if isinstance(tools, list):
            tools = PlainTools(tools)
        self._budget.steps, self._budget.written, self._budget.tools = MAX_STEPS, 0, tools
        self._budget.weights = Weights()
        given: dict[str, Any] = {
            "messages": plain_data(messages),
            "tools": tools.data if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        total = 0
        try:
            for piece in self._template.generate({**names, **given}):
                total += len(piece)
                if total > MAX_CHARS:
                    raise RenderError(f"wrote more than {MAX_CHARS} characters")
                pieces.append(piece)
        except RenderError:
            raise
        except jinja2.TemplateError as error:
            raise RenderError(error.message or type(error).__name__) from None
        except (
            ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError,
            RuntimeError, TypeError, ValueError,
        ) as error:  # fmt: skip
            raise RenderError(f"{type(error).__name__}: {error}") from None
        return "".join(pieces)

    def _check_clock(self, tree: nodes.Template, date: str) -> None:
        asks = any(node.name == "strftime_now" for node in tree.find_all(nodes.Name))
        if asks and not date:
            raise ConfigError(
                f"{self.name}: it writes today's date, so that prompts of one run would differ "
                'from day to day; set model.template_date, for example "2025-01-31"'
            )


def plain_data(value: Any) -> Any:
    """Return `value` made of JSON's own types: a template must find no method that does things.

    What JSON does not have becomes its type's name.
    """
    kind = type(value)
    if value is None or kind in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_data(item) for item in value]
    for plain in (str, int, float):
        if isinstance(value, plain):
            return plain(value)
    return f"<{kind.__name__}>"


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as templates of models want it: no HTML escapes."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _pinned(date: str, name: str) -> datetime | None:
    if not date:
        return None
    try:
        return datetime.fromisoformat(date)
    except ValueError:
        raise ConfigError(
            f"model.template_date: {date!r} is no date ({name}); write it as 2025-01-31"
        ) from None


class _Bounds(NodeTransformer):
    """Puts a counter into every loop, and a look at the size behind every `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the visitor's name
        self.generic_visit(node)
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        cost = nodes.Const(1 + written // _CHARS_A_STEP)
        node.iter = _through("_counted", cast("nodes.Expr", node.iter), cost)
        return node

    def visit_Name(self, node: nodes.Name) -> nodes.Expr:  # noqa: N802 - as above
        # A macro's further arguments: a container that no literal, call or operator made.
        further = node.ctx == "load" and node.name in ("varargs", "kwargs")
        return _through("_sized", node) if further else node

    def visit_List(self, node: nodes.List) -> nodes.Filter:  # noqa: N802 - as above
        self.generic_visit(node)
        return _through("_sized", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Filter:  # noqa: N802 - as above
        self.generic_visit(node)
        return _through("_sized", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:  # noqa: N802 - as above
        self.generic_visit(node)
        return node if node.ctx != "load" else _through("_sized", node)

    def visit_Operand(self, node: nodes.Operand) -> nodes.Operand:  # noqa: N802 - as above
        self.generic_visit(node)
        if node.op in ("in", "notin"):
            node.expr = _through("_scanned", node.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:  # noqa: N802 - as above
        self.generic_visit(node)
        return _through("_sized", node)


def _through(name: str, node: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    made = nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)
    made.environment = node.environment
    return made


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox that counts."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])
    budget: _Budget

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result is not too big."""
        _check_operands(self.budget, operator, left, right)
        made = super().call_binop(context, operator, left, right)
        if operator == "+":
            self.budget.weights.joined(made, left, right)
        return _sized(self.budget, made)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed `format` of a string that pads to nothing too long."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(str(value.__self__))
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - keywords may be called self
        """Call something: one step."""
        _step(__self.budget)
        name = getattr(__obj, "__name__", "")
        _check_arguments(getattr(__obj, "__self__", None), name, args, kwargs)
        if args or kwargs:
            for given in (*args, *kwargs.values()):
                _sized(__self.budget, given)
        return _sized(__self.budget, super().call(__context, __obj, *args, **kwargs))


def _environment(budget: _Budget, today: datetime | None) -> _Environment:
    made = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.budget = budget

    @jinja2.pass_context  # keeps it from being run, uncounted, when the template is compiled
    def counted(context: Context, items: Any, cost: int) -> Any:
        del context
        return _Counted(items, budget, cost)

    @jinja2.pass_context
    def sized(context: Context, value: Any) -> Any:
        del context
        return _sized(budget, value)

    @jinja2.pass_context
    def scanned(context: Context, value: Any) -> Any:
        del context
        if isinstance(value, str | list | tuple | range):
            _step(budget, len(value) // _CHARS_A_STEP)
        return value

    @jinja2.pass_context
    def written(context: Context, value: Any) -> Any:
        del context
        budget.written += len(value) if type(value) is str else budget.weights.of(value)
        if budget.written > MAX_CHARS:
            raise RenderError(f"wrote more than {MAX_CHARS} characters")
        return value

    made.finalize = written
    made.filters = {name: _bounded(name, filter_, budget) for name, filter_ in made.filters.items()}

    def tojson(value: Any, *args: Any, **kwargs: Any) -> str:
        write = to_json if budget.tools is None else budget.tools.to_json
        return write(value, *args, **kwargs)

    made.filters |= {
        "tojson": _bounded("tojson", tojson, budget),
        "_counted": counted,
        "_sized": sized,
        "_scanned": scanned,
    }
    made.filters["random"] = _refused("the filter `random`")
    made.globals.pop("lipsum", None)  # random text
    made.globals["raise_exception"] = _raise
    made.globals["dict"] = Dict()
    made.globals["namespace"] = Namespace
    if today is not None:
        made.globals["strftime_now"] = lambda form: today.strftime(form)
    return made


class _Counted:
    """The items of a loop, one step each."""

    def __init__(self, items: Any, budget: _Budget, cost: int) -> None:
        self._items, self._budget, self._cost = items, budget, cost

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            _step(self._budget, self._cost)
            yield item

    def __len__(self) -> int:
        return len(self._items)


def _one_by_one(items: Iterator[Any], budget: _Budget) -> Iterator[Any]:
    for item in items:
        _step(budget)
        yield item


def _step(budget: _Budget, count: int = 1) -> None:
    budget.steps -= count
    if budget.steps < 0:
        raise RenderError(f"takes more than {MAX_STEPS} steps")


def _sized(budget: _Budget, value: Any) -> Any:
    """Return a value that is not too much; making a long text takes steps."""
    if isinstance(value, str):
        if len(value) < _SHORT_CHARS:
            return value
    elif not isinstance(value, list | tuple | dict | bytes):
        return value
    weight = budget.weights.of(value)
    if weight > MAX_CHARS:
        raise RenderError(f"makes something of more than {MAX_CHARS} characters")
    if isinstance(value, str):
        _step(budget, weight // _CHARS_A_STEP)
    return value


def _bounded(name: str, filter_: Callable[..., Any], budget: _Budget) -> Callable[..., Any]:
    @wraps(filter_)  # its marks say what the library passes first
    def bounded(*args: Any, **kwargs: Any) -> Any:
        first = 1 if hasattr(filter_, "jinja_pass_arg") else 0
        subject = args[first] if len(args) > first else None
        if name not in _LOOKS and _has_len(subject) and not isinstance(subject, str):
            _step(budget, len(subject))
        _check_arguments(subject, name, args[first + 1 :], kwargs)
        made = filter_(*args, **kwargs)
        return _one_by_one(made, budget) if isinstance(made, Iterator) else _sized(budget, made)

    return bounded


def _check_arguments(
    subject: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Refuse what would make much of little: `"".ljust(10**9)`, `s.replace("a", s)`."""
    if name in _PADDING:
        for width in (*args, *kwargs.values()):
            if (isinstance(width, int) and abs(width) > MAX_WIDTH) or (
                isinstance(width, str) and len(width) > MAX_WIDTH
            ):
                raise RenderError(f"`{name}` pads to more than {MAX_WIDTH} characters")
        if name == "indent" and isinstance(subject, str):
            _check_product(MAX_WIDTH if args or kwargs else 4, subject.count("\n") + 1)
    elif name == "join":
        # `", ".join(items)`, or `items | join(", ")`
        between, items = (subject, args[:1]) if isinstance(subject, str) else (args[:1], [subject])
        separator = between if isinstance(between, str) else "".join(map(str, between))
        if items and _has_len(items[0]):
            _check_product(len(separator), len(items[0]))
    elif isinstance(subject, str):
        if name == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
            # "" is found everywhere.
            _check_product(len(args[1]), subject.count(args[0]) if args[0] else len(subject) + 1)
        elif name == "format":
            _check_format(subject)
        elif name == "translate" and args and isinstance(args[0], Mapping):
            longest = max((len(to) for to in args[0].values() if isinstance(to, str)), default=1)
            _check_product(longest, len(subject))
        elif name == "wordwrap":
            _check_product(sum(len(a) for a in args if isinstance(a, str)), len(subject))


def _check_operands(budget: _Budget, operator: str, left: Any, right: Any) -> None:
    if operator == "%" and isinstance(left, str):
        _check_format(left)
        _check_product(budget.weights.of(right), left.count("%"))
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(abs(right) * left.bit_length())
    elif operator == "*":
        for some, times in ((left, right), (right, left)):
            if isinstance(times, int) and _has_len(some):
                _check_product(budget.weights.of(some), times)
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "+" and _has_len(left) and _has_len(right):
        _check_product(1, len(left) + len(right))


def _check_format(text: str) -> None:
    if _WIDE.search(text):
        raise RenderError("a format has a width of five digits, or one that is not written in it")


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise RenderError("makes a number that is too big")


def _check_product(length: int, times: int) -> None:
    if length * max(times, 0) > MAX_CHARS:
        raise RenderError(f"makes something of more than {MAX_CHARS} characters")


def _has_len(value: Any) -> TypeGuard[str | list[Any] | tuple[Any, ...] | range]:
    return isinstance(value, str | list | tuple | range)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(str(message))


def _refused(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RenderError(f"{what} gives another prompt each time")

    return refuse
