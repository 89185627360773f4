"""`reasoning_gym:NAME?size=…&seed=…`: procedural problems, made when they are asked for.

Owns the reading of the spec and the translation of an entry. Never scores: the worker does, with
the same package. Invariant: `size` and `seed` are always explicit (500 and 0 where the spec has
none), because a data set without a seed is another one in every process.

Further parameters are those of the data set's own configuration: `&min_terms=2&max_terms=4`.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import traceback
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any
from urllib.parse import parse_qsl

from rollstream.errors import ConfigError

from . import BadRow, Row

CHECKED_ROWS = 8
"""Making a problem may be slow, so only the first few are tried before anything is enqueued."""
MAX_SIZE = 10_000_000
"""Some data sets make a list of this length when they are created."""
_DEFAULTS: dict[str, Any] = {"size": 500, "seed": 0}


class GymSource:
    """A procedural data set of reasoning-gym."""

    def __init__(self, rest: str) -> None:
        name, parameters = parse_spec(rest)
        self._name = name
        self._data = _create(name, parameters)
        if len(self._data) == 0:
            raise ConfigError(f"reasoning_gym:{name} has no rows")
        self.num_checked = min(CHECKED_ROWS, len(self._data))
        # The version counts: a release may change what a seed gives.
        decides = [name, sorted(parameters.items()), version("reasoning-gym")]
        digest = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
        self.fingerprint = f"reasoning_gym {name} {digest[:32]}"

    def __len__(self) -> int:
        """Return the number of problems."""
        return len(self._data)

    def row(self, number: int) -> Row:
        """Return problem `number` as a row."""
        where = f"reasoning_gym:{self._name} row {number}"
        try:
            entry = self._data[number]
        except Exception as error:  # noqa: BLE001 - a generator of the package may raise anything
            raise BadRow(where, f"{type(error).__name__}: {error}") from None
        found = make_plain(entry.get("metadata") or {})
        metadata = {**found, "source_dataset": self._name, "source_index": number}
        prompt = [{"role": "user", "content": entry["question"]}]
        values = {"prompt": prompt, "label": make_plain(entry["answer"]), "metadata": metadata}
        return Row(where, values)

    def close(self) -> None:
        """Do nothing: a problem needs no file."""


def parse_spec(rest: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the parameters of `NAME?key=value&…`; values are JSON, or text.

    Raises:
        ConfigError: not of that form.
    """
    name, _, query = rest.partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError as error:
        raise ConfigError(f"reasoning_gym:{rest}: {error}") from None
    given: dict[str, Any] = {}
    for key, text in pairs:
        if key in given:
            raise ConfigError(f"reasoning_gym:{rest}: {key} stands twice")
        try:
            given[key] = json.loads(text)
        except ValueError:
            given[key] = text
    parameters = {**_DEFAULTS, **given}
    for key, least in (("size", 1), ("seed", 0)):
        value = parameters[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(
                f"reasoning_gym:{rest}: {key} = {value!r}: "
                f"expected a whole number of at least {least}"
            )
    if parameters["size"] > MAX_SIZE:
        raise ConfigError(
            f"reasoning_gym:{name}: size = {parameters['size']}: at most "
            f"{MAX_SIZE}; producer.epochs repeats a data set"
        )
    return name, parameters


def make_plain(value: Any) -> Any:
    """Return `value` in types that the wire has: tuples and sets become lists, numbers Python's."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else str(k): make_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [make_plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((make_plain(v) for v in value), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return make_plain(dataclasses.asdict(value))
    to_list = getattr(value, "tolist", None)  # numpy's scalars and arrays
    return make_plain(to_list()) if to_list is not None else str(value)


def _create(name: str, parameters: dict[str, Any]) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError:
        raise ConfigError(
            "reasoning-gym is not installed; pip install 'rollstream[service]'"
        ) from None
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"reasoning_gym has no data set {name!r}{hint}")
    known = [f.name for f in dataclasses.fields(DATASETS[name][1])]
    for key in parameters:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known)}"
            raise ConfigError(f"{name} has no parameter {key!r}; {hint}")
    try:
        return create_dataset(name, **parameters)
    except Exception as error:  # noqa: BLE001 - data sets check their parameters with asserts
        # Their asserts often have no message: the asserting line itself says what is wrong.
        frames = traceback.extract_tb(error.__traceback__)
        reason = str(error) or (frames[-1].line if frames else "")
        raise ConfigError(
            f"reasoning_gym:{name} refuses {parameters}: {type(error).__name__}: {reason}"
        ) from None
