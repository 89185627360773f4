"""Beside no program: runs the asserts of a row, and asks the program's process for every call.

    python -I main.py REQUESTS ANSWERS VERDICTS    (the text of the asserts is its stdin)

Names of the program are stand-ins here: a call goes to its process and comes back as plain data,
so what an assert compares with never leaves this process, and no `__eq__` of the program is asked
about it. An object that is no plain data stays where it is; its stand-in forwards attributes,
calls, `len`, indexing and iteration, and equals other stand-ins only.

Verdicts, one line each: {"total": n}, then {"ok": bool, "problem": str} for each top-level assert
(one for a text without any), or {"unusable": str}.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import importlib
import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # not at run time: the import costs milliseconds in every program
    from collections.abc import Callable, Sequence
    from types import CodeType
    from typing import Any

ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # a program of the same user cannot read this memory
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import plain  # type: ignore[import-not-found]  # noqa: E402

del sys.path[0]
MAX_PROBLEM_CHARS = 300
MAX_ANSWER_BYTES = 1 << 20
UNREADABLE = (ValueError, TypeError, KeyError, RecursionError, OverflowError, AttributeError)
MODULES = {"np": "numpy", "pd": "pandas"}
"""Usual names of modules that a program imported and tests go on using."""


class ProgramEnded(BaseException):
    """Its process is gone."""


class Unusable(BaseException):
    """The tests ask for what cannot be sent."""


_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)


class Uses:
    """What the text of the tests uses and does not define itself."""

    def __init__(self, tree: ast.Module) -> None:
        self.names: set[str] = set()
        """All of them."""
        bound: set[str] = set()
        plainly: set[str] = set()
        bases: dict[str, set[str]] = {}
        nodes = list(ast.walk(tree))
        as_base = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
        for node in nodes:
            if isinstance(node, ast.Name):
                self.names.add(node.id)
                if not isinstance(node.ctx, ast.Load):
                    bound.add(node.id)
                elif id(node) not in as_base:
                    plainly.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                bases.setdefault(node.value.id, set()).add(node.attr)
            elif isinstance(node, ast.alias):
                bound.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, _NAMED) and node.name:
                bound.add(node.name)
        self.modules = {
            name
            for name, attributes in bases.items()
            if name not in bound | plainly and _has_all(name, attributes)
        }
        """Modules of Python's, of which the tests use what there is: no object of a program."""
        self.only_built_in = all(hasattr(builtins, n) for n in self.names - bound - self.modules)
        """Whether what they test has the name of a built-in function."""


def _has_all(name: str, attributes: set[str]) -> bool:
    """Return whether there is such a module of Python's, or a usual one, that has all these."""
    if name not in sys.stdlib_module_names and name not in (*MODULES, *MODULES.values()):
        return False
    try:
        module = importlib.import_module(MODULES.get(name, name))
    except ImportError:
        return False
    return all(hasattr(module, attribute) for attribute in attributes)


class Line:
    """Requests to the program's process, one at a time."""

    def __init__(self, requests: int, answers: int) -> None:
        self.requests = open(requests, "wb")  # noqa: SIM115 - as long as the process
        self.answers = open(answers, "rb")  # noqa: SIM115
        self.handles: dict[int, StandIn] = {}

    def let_load(self) -> None:
        """Let its process load the program; until then nothing of it runs beside this one."""
        self.requests.write(b"{}\n")
        self.requests.flush()

    def receive(self) -> dict[str, Any]:
        """Return the next answer."""
        text = self.answers.readline(MAX_ANSWER_BYTES + 1)
        if not text.endswith(b"\n"):
            raise ProgramEnded
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            raise ProgramEnded from None
        if not isinstance(answer, dict):
            raise ProgramEnded
        return answer

    def ask(
        self,
        do: str,
        of: Any = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
    ) -> Any:
        """Do something there; return its value, or raise what it raised."""
        request = {
            "do": do,
            "of": plain.encode(of, handle_of),
            "name": name,
            "args": [plain.encode(item, handle_of) for item in args],
            "kwargs": {key: plain.encode(item, handle_of) for key, item in (kwargs or {}).items()},
        }
        try:
            self.requests.write(json.dumps(request).encode() + b"\n")
            self.requests.flush()
        except OSError:
            raise ProgramEnded from None
        answer = self.receive()
        if "error" in answer:
            raise exception_of(answer["error"])
        try:
            for old, new in zip(args, answer.get("args", ()), strict=False):
                replace(old, plain.decode(new, self.stand_in))
            return plain.decode(answer.get("value"), self.stand_in)
        except UNREADABLE:
            raise ProgramEnded from None

    def names(self, uses: Uses) -> dict[str, Any]:
        """Return a namespace with what the program defines, of the names that the tests use.

        A built-in function stays one (a program's own `abs` would judge its own results), unless
        the tests use nothing else of a program. So does a module of Python's.
        """
        self.requests.write(b'{"do": "names"}\n')
        self.requests.flush()
        answer = self.receive()
        defined = {
            name: plain.decode(value, self.stand_in)
            for name, value in answer.get("value", {}).items()
            if name in uses.names
        }
        found = {
            name: value
            for name, value in defined.items()
            if uses.only_built_in or not hasattr(builtins, name)
        }
        said = {
            name
            for name, module in answer.get("modules", {}).items()
            if module.partition(".")[0] == MODULES.get(name, name)
        }
        for name in uses.names & said | uses.modules & (said | found.keys()):
            with contextlib.suppress(ImportError):
                found[name] = importlib.import_module(MODULES.get(name, name))
        return found

    def stand_in(self, number: int) -> StandIn:
        """Return what stands for an object there; the same for the same."""
        if number not in self.handles:
            self.handles[number] = StandIn(self, number)
        return self.handles[number]


def handle_of(value: Any) -> int:
    """Return the number of a stand-in; nothing else can be sent."""
    if type(value) is StandIn:
        number: int = object.__getattribute__(value, "_number")
        return number
    raise Unusable(f"the tests give the program a {type(value).__name__}")


def replace(old: Any, new: Any) -> None:
    """Make an argument what the program made of it."""
    if type(old) is list and type(new) is list:
        old[:] = new
    elif type(old) in (dict, set) and type(new) is type(old):
        old.clear()
        old.update(new)


def exception_of(error: Any) -> Exception:
    """Return an exception like the one that was raised there, of a built-in class."""
    name = error[0] if isinstance(error, list) and error else ""
    text = error[1] if isinstance(error, list) and len(error) > 1 else ""
    kind = getattr(builtins, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        kind = RuntimeError
    try:
        return kind(text)
    except TypeError:  # UnicodeDecodeError and its like
        return RuntimeError(text)


class StandIn:
    """An object of the program's process.

    A value that the tests compare or compute it with is not sent there: an object that says yes to
    everything would pass. So an object equals no plain value, and tests that order it with one, or
    compute with both, are unusable where its class has a say in that.
    """

    __slots__ = ("_line", "_number")

    def __init__(self, line: Line, number: int) -> None:
        object.__setattr__(self, "_line", line)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        return line_of(self).ask("call", self, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return line_of(self).ask("get", self, name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        line_of(self).ask("set", self, (value,), name=name)

    def __instancecheck__(self, value: Any) -> bool:
        return type(value) is StandIn and bool(line_of(self).ask("is", value, (self,)))

    def __bool__(self) -> bool:
        return bool(special(self, "__bool__"))

    def __str__(self) -> str:
        return str(special(self, "__str__"))

    def __repr__(self) -> str:
        return str(special(self, "__repr__"))

    def __hash__(self) -> int:
        return object.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return type(other) is StandIn and bool(special(self, "__eq__", other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __contains__(self, item: object) -> bool:
        refuse_own(self, "__contains__", item)
        return any(item == other for other in special(self, "__iter__"))


def line_of(stand_in: StandIn) -> Line:
    """Return the line to its process."""
    line: Line = object.__getattribute__(stand_in, "_line")
    return line


def special(stand_in: StandIn, name: str, *args: Any) -> Any:
    """Do there what one of its methods with double underscores is for."""
    return line_of(stand_in).ask("special", stand_in, args, name=name)


def refuse_own(stand_in: StandIn, name: str, other: Any) -> None:
    """Refuse tests in which the program's class would judge a value that the tests know."""
    if type(other) is not StandIn and line_of(stand_in).ask("own", stand_in, name=name):
        raise Unusable(f"the tests give a value to {name} of an object of the program")


def forward(name: str) -> Callable[..., Any]:
    """Return a method that is called there, whatever its arguments."""

    def method(self: StandIn, *args: Any) -> Any:
        return special(self, name, *args)

    return method


def between(name: str) -> Callable[..., Any]:
    """Return a method that is called there with other objects of the program."""

    def method(self: StandIn, other: Any) -> Any:
        if type(other) is StandIn:
            return special(self, name, other)
        refuse_own(self, name, other)
        return NotImplemented

    return method


for _name in "len iter next reversed getitem setitem delitem int float index neg pos abs".split():
    setattr(StandIn, f"__{_name}__", forward(f"__{_name}__"))
for _name in (
    "lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "and rand or ror xor rxor lshift rshift matmul"
).split():
    setattr(StandIn, f"__{_name}__", between(f"__{_name}__"))


def examine(line: Line, text: str, tell: Callable[[dict[str, Any]], None]) -> None:
    """Run the asserts, and tell each verdict."""
    try:
        tree = ast.parse(text, "tests")
        codes = [compile(ast.Module([node], []), "tests", "exec") for node in tree.body]
    except SyntaxError as error:
        raise Unusable(str(error)) from None
    num_asserts = sum(isinstance(node, ast.Assert) for node in tree.body)
    tell({"total": max(1, num_asserts)})
    line.let_load()
    began = line.receive()
    if began.get("loaded") is not True:
        said = began.get("error", ["", ""])
        tell({"ok": False, "problem": f"the program does not load: {said[0]}: {said[1]}"})
        return
    names = {**line.names(Uses(tree)), "__name__": "tests"}
    problem = ""
    for node, code in zip(tree.body, codes, strict=True):
        is_test = isinstance(node, ast.Assert)
        if is_test or not problem:
            found = run(node, code, names, text)
            if is_test:
                tell({"ok": not (found or problem), "problem": found or problem})
            else:
                problem = found
    if num_asserts == 0:
        tell({"ok": not problem, "problem": problem})


def run(node: ast.stmt, code: CodeType, names: dict[str, Any], text: str) -> str:
    """Run one statement; return what is wrong, or nothing."""
    try:
        exec(code, names)
    except AssertionError as error:
        said = ast.get_source_segment(text, node) or "assert"
        return f"{said[:200]} does not hold {words_of(error)[:80]}".strip()
    except Exception as error:  # noqa: BLE001 - whatever the program raised
        said = ast.get_source_segment(text, node) or ""
        return f"{said[:150]}: {type(error).__name__}: {words_of(error)[:120]}"
    return ""


def words_of(error: Exception) -> str:
    """Return its text; an object of the program in it may raise anything when it is asked."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever the program raised
        return ""


def main() -> None:
    """Examine one program."""
    requests, answers, verdicts = (int(number) for number in sys.argv[1:4])
    text = sys.stdin.read()
    with open(verdicts, "wb") as writer:

        def tell(verdict: dict[str, Any]) -> None:
            if "problem" in verdict:
                verdict["problem"] = verdict["problem"][:MAX_PROBLEM_CHARS]
            writer.write(json.dumps(verdict).encode() + b"\n")
            writer.flush()

        try:
            examine(Line(requests, answers), text, tell)
        except ProgramEnded:
            pass
        except Unusable as error:
            tell({"unusable": str(error)[:MAX_PROBLEM_CHARS]})
        writer.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
