"""Loading of the configuration: where each value comes from, and what is said when one is wrong.

Owns the precedence and the origins: defaults, then `rollstream.toml`, then
`ROLLSTREAM_<TABLE>__<KEY>`, then `--table.key value`. Never decides what a key means: the tables
are in `rollstream.settings`. Invariant: every value is checked before a process does anything,
and whatever is wrong is one `ConfigError` that names the key, where it was given, what was given
and what is expected. (pydantic-settings ignores unknown environment names and forgets origins,
which is what this module is about; so only pydantic itself is used.)
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from rollstream.config_keys import (
    ENV_PREFIX,
    NAMED,
    KeyPath,
    annotation_of,
    children,
    did_you_mean,
    environment_name,
    flag_name,
    is_settable,
    plain,
)
from rollstream.errors import ConfigError, RollstreamError, RunMismatch
from rollstream.log_sink import hold_standard_descriptors, say
from rollstream.masking import mask
from rollstream.settings import Settings
from rollstream.urls import scrub

DEFAULT_FILE = "rollstream.toml"
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Loaded:
    """The checked settings of one process, and where each value came from."""

    settings: Settings
    origins: Mapping[str, str] = field(default_factory=dict)
    """{"table.key": "rollstream.toml:12" | "ROLLSTREAM_TABLE__KEY" | "--table.key"}; a key that
    is not in it has its default."""
    file: Path | None = None

    def origin(self, key: str) -> str:
        """Return where the value of `key` ("table.key") came from."""
        return _origin_of(tuple(key.split(".")), self.origins)


def load_settings(
    argv: Sequence[str],
    *,
    prog: str,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Loaded:
    """Read the configuration of this process.

    Args:
        argv: the arguments behind the program's name: `--config PATH`, `--table.key value`,
            `--table.key=value` (a switch may stand alone), `--help`.
        prog: how the program is called, for `--help`.
        environ: None is `os.environ`.
        folder: where `rollstream.toml` is looked for; None is the current folder.

    Raises:
        ConfigError: an unknown key, a bad value, an unreadable file.
        SystemExit: `--help` was asked for and printed.
    """
    if "--help" in argv or "-h" in argv:
        from rollstream.config_help import help_text

        try:
            print(help_text(prog), flush=True)  # noqa: T201 - the answer to --help
        except BrokenPipeError:  # `--help | head`: Python would complain again at its exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)
    flags, given_file = _read_flags(argv)
    path = _find_file(given_file, folder or Path())
    layers = _Layers()
    if path is not None:
        layers.add_file(path)
    layers.add_environment(os.environ if environ is None else environ)
    layers.add_flags(flags)
    return Loaded(layers.check(), layers.origins, path)


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (the arguments that are configuration, all others), each in order.

    For commands with options of their own: configuration is `--config` and every `--table.key`.
    """
    ours: list[str] = []
    others: list[str] = []
    takes_value = False
    for arg in argv:
        name = arg.partition("=")[0]
        if takes_value and not arg.startswith("--"):
            ours.append(arg)
            takes_value = False
        elif arg.startswith("--") and ("." in name or name == "--config"):
            ours.append(arg)
            takes_value = "=" not in arg
        else:
            others.append(arg)
            takes_value = False
    return ours, others


class _Layers:
    """Values from all sources, later ones over earlier ones, as pydantic reads them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[str, str] = {}

    def add_file(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8-sig")
            tree = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path}: not TOML: {error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8: {error}") from None
        except (ValueError, RecursionError) as error:  # a number or a nest that Python refuses
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        lines = _lines_of_keys(text)
        for key, value in _leaves(tree):
            line = next((lines[key[:k]] for k in range(len(key), 0, -1) if key[:k] in lines), None)
            origin = f"{path}" if line is None else f"{path}:{line}"
            if annotation_of(key) is None:
                raise ConfigError(f"{origin}: unknown key {'.'.join(key)}{did_you_mean(key)}")
            self._put(key, value, origin)

    def add_environment(self, environ: Mapping[str, str]) -> None:
        for name in sorted(environ):
            # Without `__` a name is not ours: Kubernetes injects ROLLSTREAM_SERVICE_HOST and more.
            if not name.startswith(ENV_PREFIX) or "__" not in name:
                continue
            key = self._as_named(tuple(name[len(ENV_PREFIX) :].lower().split("__")))
            if annotation_of(key) is None:
                near = did_you_mean(key, environment_name)
                raise ConfigError(f"environment {name}: unknown key {'.'.join(key)}{near}")
            self._put(key, _parse(key, environ[name], name), name)

    def add_flags(self, flags: Sequence[tuple[str, str | None]]) -> None:
        for name, text in flags:
            key = tuple(name.removeprefix("--").split("."))
            annotation = annotation_of(key)
            if annotation is None:
                raise ConfigError(f"{name}: unknown option{did_you_mean(key, flag_name)}")
            if text is None and plain(annotation) is not bool:
                raise ConfigError(f"{name}: a value is missing; write {name} VALUE")
            self._put(key, True if text is None else _parse(key, text, name), name)

    def check(self) -> Settings:
        """Return the settings, or say what is wrong with the values."""
        try:
            return Settings.model_validate(self.values)
        except ValidationError as error:
            problems = [self._problem(item) for item in error.errors(include_url=False)]
        rest = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + rest)

    def _put(self, key: KeyPath, value: Any, origin: str) -> None:
        annotation = plain(annotation_of(key))
        # An empty `[env.NAME]` is an environment with every default.
        if not is_settable(annotation) and value != {}:
            raise ConfigError(
                f"{origin}: {'.'.join(key)} is a table; set one of its keys: "
                f"{', '.join(children(key))}"
            )
        if isinstance(value, bool) and annotation in (int, float):
            kind = "a whole number" if annotation is int else "a number"
            raise ConfigError(f"{'.'.join(key)} = {value} (from {origin}): expected {kind}")
        table = self.values
        for part in key[:-1]:
            table = table.setdefault(part, {})
        if not is_settable(annotation):
            table.setdefault(key[-1], {})
            return
        table[key[-1]] = value
        name = ".".join(key)
        for known in [k for k in self.origins if k.startswith(f"{name}.")]:
            del self.origins[known]
        self.origins[name] = origin

    def _as_named(self, key: KeyPath) -> KeyPath:
        """Give a named table the spelling of the file: variables have no lower case."""
        if len(key) > 1 and key[0] in NAMED:
            for known in self.values.get(key[0], {}):
                if known.lower() == key[1]:
                    return (key[0], known, *key[2:])
        return key

    def _problem(self, item: Any) -> str:
        key = tuple(str(part) for part in item["loc"])
        while len(key) > 1 and annotation_of(key) is None:
            key = key[:-1]
        name, origin = ".".join(key), _origin_of(key, self.origins)
        given = mask(item["input"]) if plain(annotation_of(key)) is not SecretStr else "***"
        given = given if len(repr(given)) <= MAX_SHOWN else _shortened(repr(given))
        expected = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        return f"{name} = {given!r} (from {origin}): expected {expected}"


def _origin_of(key: KeyPath, origins: Mapping[str, str]) -> str:
    for k in range(len(key), 0, -1):
        found = origins.get(".".join(key[:k]))
        if found:
            return found
    below = [origin for name, origin in origins.items() if name.startswith(".".join(key) + ".")]
    return ", ".join(dict.fromkeys(below)) or DEFAULT


# --- reading each source -------------------------------------------------------------------------
def _read_flags(argv: Sequence[str]) -> tuple[list[tuple[str, str | None]], str | None]:
    flags: list[tuple[str, str | None]] = []
    file: str | None = None
    rest = list(argv)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--") or arg == "--":
            raise ConfigError(f"unexpected argument {arg!r}; options are --table.key value")
        name, equals, text = arg.partition("=")
        value: str | None = text if equals else None
        if not equals and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        if name == "--config":
            if not value:
                raise ConfigError("--config: a path is missing")
            file = value
        else:
            flags.append((name, value))
    return flags, file


def _find_file(given: str | None, folder: Path) -> Path | None:
    if given is not None:
        path = Path(given)
        if not path.is_file():
            raise ConfigError(f"--config {given}: there is no such file")
        return path
    path = folder / DEFAULT_FILE
    return path if path.is_file() else None


def _parse(key: KeyPath, text: str, origin: str) -> Any:
    """Turn the text of a variable or an option into what the key's type reads."""
    annotation = annotation_of(key)
    kind = plain(annotation)
    stripped = text.strip()
    if annotation is not kind and stripped.lower() in ("", "none", "null"):
        return None
    if get_origin(kind) is tuple:
        if stripped.startswith("["):
            return _parse_json(key, stripped, origin, "a JSON list, or values with commas")
        return [part.strip() for part in text.split(",") if part.strip()]
    if get_origin(kind) is dict and is_settable(kind):
        if stripped.startswith("{"):
            return _parse_json(key, stripped, origin, "a JSON object, or name=value with commas")
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        if not all(equals for _, equals, _ in pairs):
            raise ConfigError(
                f"{'.'.join(key)} = {_shortened(text)!r} (from {origin}): "
                "expected a JSON object, or name=value with commas"
            )
        return {name.strip(): _loosely(value.strip(), kind) for name, _, value in pairs}
    return _loosely(text, kind) if kind is Any else text


def _loosely(text: str, kind: Any) -> Any:
    if kind is not Any and get_args(kind)[1:] != (Any,):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


MAX_SHOWN = 200
"""Characters of a wrong value that an error repeats."""
MAX_LINE = 4000
"""Characters of the one line that a process ends with."""


def _shortened(text: str, most: int = MAX_SHOWN) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _parse_json(key: KeyPath, text: str, origin: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{'.'.join(key)} = {_shortened(text)!r} (from {origin}): expected {expected} ({error})"
        ) from None


def _leaves(tree: Mapping[str, Any], above: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield what a file sets, as deep as the tables go; a dictionary value stays one value."""
    for name, value in tree.items():
        key = (*above, name)
        kind = plain(annotation_of(key))
        if isinstance(value, dict) and value and kind is not None and not is_settable(kind):
            yield from _leaves(value, key)
        else:
            yield key, value


_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_ASSIGNMENT = re.compile(r"^\s*([A-Za-z0-9_.\"'\- ]+?)\s*=")


def _lines_of_keys(text: str) -> dict[KeyPath, int]:
    """Return on which line each table and key of a TOML file stands (tomllib does not say)."""
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _dotted(header.group(1))
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault((*table, *_dotted(assignment.group(1))), number)
    return lines


def _dotted(text: str) -> KeyPath:
    return tuple(part.strip().strip("\"'") for part in text.split("."))


# --- starting a process --------------------------------------------------------------------------
EXIT_OTHER, EXIT_CONFIG, EXIT_UNREACHABLE, EXIT_MISMATCH, EXIT_INTERRUPTED = 1, 2, 3, 4, 130
EXIT_STALLED = 5
"""Of a process that cannot go on: its loop stood still, or threads or memory are used up."""
log = logging.getLogger("rollstream")


def run_app(
    main: Callable[[Loaded], int | None], prog: str, argv: Sequence[str] | None = None
) -> int:
    """Load the configuration, run `main`, and turn what it raises into one line and an exit code.

    Args:
        main: the process; None counts as 0. It may raise anything, alone or in a group.
        prog: how the program is called, for messages and `--help`.
        argv: None is what the process was started with.

    Returns:
        What `sys.exit` is to be given; `rollstream.config_help.EXIT_CODES` documents it.
    """
    hold_standard_descriptors()
    try:
        return main(load_settings(sys.argv[1:] if argv is None else argv, prog=prog)) or 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        cause = _cause(error)
        code, message = _verdict(cause)
        if code == EXIT_OTHER and not isinstance(cause, RollstreamError):
            # A bug: the traceback belongs in the log, where one record is one line.
            if logging.getLogger().handlers:
                log.error("unexpected_error", exc_info=cause)
            message = f"unexpected {type(cause).__name__}{_where(cause)}: {message}"
        # Never waited for, and never another error: that would hide the exit code.
        say(f"{prog}: error: {_shortened(scrub(' '.join(message.split())), MAX_LINE)}")
        return code


def _cause(error: BaseException) -> BaseException:
    """Return the first error of a task group: its siblings were only cancelled for it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _verdict(error: BaseException) -> tuple[int, str]:
    # By class name along the inheritance, so that an app without redis need not import it.
    names = {f"{c.__module__.partition('.')[0]}.{c.__name__}" for c in type(error).__mro__}
    text = str(error) or type(error).__name__
    own = _own_code(error)
    if own is not None:
        return own, text
    if "redis.AuthenticationError" in names:
        return EXIT_CONFIG, f"Redis refused the user or password of redis.url: {text}"
    if "redis.NoPermissionError" in names:
        return EXIT_CONFIG, f"the user of redis.url lacks a right (docs/deploy.md, ACL): {text}"
    if names & {"redis.ConnectionError", "redis.TimeoutError"}:
        return EXIT_UNREACHABLE, f"Redis cannot be reached: {text}; check redis.url"
    if "redis.InvalidResponse" in names:
        return EXIT_UNREACHABLE, f"what answers at redis.url is not Redis: {text}"
    if "redis.ResponseError" in names:
        for words, code, meaning in _REFUSALS:
            if words in text:
                return code, f"{meaning}: {text}"
    if isinstance(error, ConnectionError | TimeoutError):
        return EXIT_UNREACHABLE, text
    return EXIT_OTHER, text


def _own_code(error: BaseException) -> int | None:
    """Return the exit code that a kind of error has by itself."""
    for kind, code in (
        (ConfigError, EXIT_CONFIG),
        (RunMismatch, EXIT_MISMATCH),
        (MemoryError, EXIT_STALLED),
    ):
        if isinstance(error, kind):
            return code
    own = getattr(error, "exit_code", None)
    return own if isinstance(own, int) else None


_FOREIGN = (
    "keys under this run's name (rs:{run.name}:*) are another program's, or damaged; take another "
    "run.name, or remove them"
)
_REFUSALS = (
    ("WRONGTYPE", EXIT_MISMATCH, _FOREIGN),
    ("DB index is out of range", EXIT_CONFIG, "redis.url names a database that Redis has not"),
    ("ACL failure", EXIT_CONFIG, "the user of redis.url lacks a right that the scripts need"),
    ("unknown command", EXIT_CONFIG, "redis.url needs Redis 6.2 or newer, or Valkey"),
    ("read only replica", EXIT_UNREACHABLE, "redis.url is a replica; give that of the primary"),
    ("MISCONF", EXIT_UNREACHABLE, "Redis takes no writes while it cannot save to its disk"),
    ("NOREPLICAS", EXIT_UNREACHABLE, "Redis takes no writes while it has too few replicas"),
    ("maxmemory", EXIT_UNREACHABLE, "the memory of Redis is full"),
)  # fmt: skip
"""What a server refuses for a reason of its own: (its words, our exit code, what it means)."""


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


# --- showing -------------------------------------------------------------------------------------
def show(loaded: Loaded, as_json: bool = False) -> str:
    """Return every effective value with where it came from; secrets are masked.

    Args:
        loaded: what `load_settings` returned.
        as_json: {"table.key": {"value", "origin"}} in place of lines for people.
    """
    rows = [(key, mask(value), loaded.origin(key)) for key, value in _values(loaded.settings)]
    if as_json:
        return json.dumps(
            {key: {"value": value, "origin": origin} for key, value, origin in rows}, indent=2
        )
    texts = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value, _ in rows]
    width = min(max(map(len, texts)), 60)
    lines: list[str] = []
    table = ""
    for text, (key, _, origin) in zip(texts, rows, strict=True):
        if key.partition(".")[0] != table:
            lines += [""] if table else []
            table = key.partition(".")[0]
        lines.append(f"{text:<{width}}  # {origin}")
    return "\n".join(lines)


def _values(table: BaseModel, above: str = "") -> Iterator[tuple[str, Any]]:
    for name in type(table).model_fields:
        value, key = getattr(table, name), f"{above}{name}"
        if isinstance(value, BaseModel):
            yield from _values(value, f"{key}.")
        elif name in NAMED and not above:
            for named, inner in value.items():
                yield from _values(inner, f"{key}.{named}.")
        else:
            yield key, value
