"""Beside the program: loads it, and calls what it is asked to call. `main.py` of its folder.

    python -I main.py REQUESTS ANSWERS

Both are file descriptors with JSON lines; the program is loaded behind the first request, which
asks for nothing. It knows arguments and never an expected value, so there is nothing here for the
program to read or to forge: an answer is data that others compare.

    {"do": "names"}      {"value": {name: ...}, "modules": {...}}
    {"do": "entry", "name": ..., "args": [...]}      {"value": ...} or {"error": [type, text]}
    {"do": "call", "of": ..., "args": [...], "kwargs": {}}      and "args", as they are then
    {"do": "get" | "set", "of": ..., "name": ...}
    {"do": "special", "of": ..., "name": "__len__", "args": []}
    {"do": "own", "of": ..., "name": "__eq__"}      whether its class has one of its own
    {"do": "is", "of": ..., "args": [class]}
"""

from __future__ import annotations

import json
import operator
import os
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:  # not at run time: the import costs milliseconds in every program
    from collections.abc import Callable
    from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import plain  # type: ignore[import-not-found]  # noqa: E402

del sys.path[0], sys.modules["plain"]
MAX_ANSWER_CHARS = 1 << 20
NAME = "program"


class Server:
    """The loaded program, and the objects of it that somebody refers to."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        self.numbers: dict[int, int] = {}
        self.module = types.ModuleType(NAME)
        # Where dataclasses, pickle and others look for the module of a class.
        sys.modules[NAME] = self.module

    def load(self) -> None:
        """Run the program's text."""
        with open("program.py", encoding="utf-8", errors="surrogatepass") as file:
            code = compile(file.read(), "program.py", "exec", dont_inherit=True)
        exec(code, self.module.__dict__)

    def keep(self, value: Any) -> int:
        """Number an object; the same for the same."""
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.kept)
            self.kept.append(value)
        return self.numbers[id(value)]

    def refuse(self, value: Any) -> int:
        """Say that it is not plain."""
        raise plain.NotPlain(f"returned {type(value).__name__}, which is no plain data")

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked."""
        do = request["do"]
        if do == "names":
            return self.names()
        if do == "entry":
            args = [plain.decode(item, self.refuse) for item in request["args"]]
            return {"value": plain.encode(self.entry(request["name"])(*args), self.refuse)}
        of = plain.decode(request["of"], self.kept.__getitem__)
        args = [plain.decode(item, self.kept.__getitem__) for item in request.get("args", ())]
        kwargs = {
            key: plain.decode(item, self.kept.__getitem__)
            for key, item in request.get("kwargs", {}).items()
        }
        if do == "get":
            value = getattr(of, request["name"])
        elif do == "set":
            value = setattr(of, request["name"], args[0])  # type: ignore[func-returns-value]
        elif do == "is":
            value = isinstance(of, args[0])
        elif do == "own":
            name = request["name"]
            value = getattr(type(of), name, None) not in (None, getattr(object, name, None))
        elif do == "special":
            value = special(of, request["name"], args)
        else:
            value = of(*args, **kwargs)
        changed = [plain.encode(item, self.keep) for item in args]
        return {"value": plain.encode(value, self.keep), "args": changed}

    def names(self) -> dict[str, Any]:
        """Return what the program defined, and the modules that it imported."""
        found, modules = {}, {}
        for name, value in list(self.module.__dict__.items()):
            if isinstance(value, types.ModuleType):
                modules[name] = value.__name__
            elif not name.startswith("__"):
                found[name] = plain.encode(value, self.keep)
        return {"value": found, "modules": modules}

    def entry(self, name: str) -> Any:
        """Return a function by its name: `f`, `Class.method`, or a method of `Solution`."""
        names = self.module.__dict__
        if name not in names and "." not in name and isinstance(names.get("Solution"), type):
            name = "Solution." + name
        first, _, rest = name.partition(".")
        if first not in names:
            raise NameError(f"name {name!r} is not defined")
        value = names[first]
        if rest:
            value = getattr(value() if isinstance(value, type) else value, rest)
        return value


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "__bool__": bool,
    "__str__": str,
    "__repr__": repr,
    "__iter__": iter,
    "__next__": next,
    "__len__": len,
    "__reversed__": reversed,
    **{f"__{name}__": getattr(operator, name) for name in "eq lt le gt ge getitem".split()},
}


def special(of: Any, name: str, args: list[Any]) -> Any:
    """Do what a method with double underscores is for."""
    if name in FUNCTIONS:
        return FUNCTIONS[name](of, *args)
    method = getattr(type(of), name, None)
    value = NotImplemented if method is None else method(of, *args)
    if value is NotImplemented:
        raise TypeError(f"{type(of).__name__} has no {name} for this")
    return value


def line(answer: dict[str, Any]) -> str:
    """Return an answer as text; one that cannot be sent is an error."""
    try:
        text = json.dumps(answer)
    except RecursionError as error:
        return json.dumps({"error": ["RecursionError", str(error)]})
    if len(text) > MAX_ANSWER_CHARS:
        return json.dumps({"error": ["ValueError", "the value is too large"]})
    return text


def failed(error: BaseException) -> dict[str, Any]:
    """Return an answer for an exception, with the built-in class that it is of."""
    try:
        text = str(error)[:500]
    except BaseException:  # noqa: BLE001 - it is the program's
        text = ""
    bases = [kind for kind in type(error).__mro__ if kind.__module__ == "builtins"]
    return {"error": [bases[0].__name__, text, type(error).__name__]}


def main() -> None:
    """Serve until there are no more requests."""
    requests, answers = (int(number) for number in sys.argv[1:3])
    del sys.argv[1:]
    server = Server()
    with open(requests, "rb") as reader, open(answers, "wb") as writer:

        def tell(answer: dict[str, Any]) -> None:
            writer.write(line(answer).encode() + b"\n")
            writer.flush()

        reader.readline()  # whoever judges it has hidden its memory by now
        try:
            server.load()
        except BaseException as error:
            tell({"loaded": False, **failed(error)})
            raise
        tell({"loaded": True})
        for text in reader:
            try:
                answer = server.answer(json.loads(text))
            except BaseException as error:  # noqa: BLE001 - whatever the program raised
                answer = failed(error)
            tell(answer)
    sys.stdout.flush()
    os._exit(0)  # not by what the program hung into the end of the interpreter


if __name__ == "__main__":
    main()
