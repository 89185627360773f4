"""Which keys the configuration has: their types, their names in each source, the nearest one.

Owns the walk over the models of `rollstream.settings`. Never reads a value. Invariant: there is
no list of keys beside the models.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel

from rollstream.settings import Settings

ENV_PREFIX = "ROLLSTREAM_"
KeyPath: TypeAlias = tuple[str, ...]


NAMED = frozenset(
    name for name, info in Settings.model_fields.items() if get_origin(info.annotation) is dict
)
"""Tables of tables: their second part is a name that the user gives (`env.NAME`)."""


def annotation_of(key: KeyPath) -> Any:
    """Return the type of a key, or None where there is no such key."""
    here: Any = Settings
    for part in key:
        here = plain(here)
        if is_table(here):
            info = here.model_fields.get(part)
            if info is None:
                return None
            here = info.annotation
        elif get_origin(here) is dict and part:
            here = get_args(here)[1]
        else:
            return None
    return here


def all_keys(table: type[BaseModel] = Settings, above: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield every key that can be set; `NAME` stands for a name that the user gives."""
    for name, info in table.model_fields.items():
        here, key = plain(info.annotation), (*above, name)
        if is_table(here):
            yield from all_keys(here, key)
        elif get_origin(here) is dict and is_table(get_args(here)[1]):
            yield from all_keys(get_args(here)[1], (*key, "NAME"))
        else:
            yield key


def environment_name(key: KeyPath) -> str:
    """Return the environment variable of a key."""
    return ENV_PREFIX + "__".join(key).upper()


def flag_name(key: KeyPath) -> str:
    """Return the command line option of a key."""
    return "--" + ".".join(key)


def plain(annotation: Any) -> Any:
    """Return a type without its `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        some = [a for a in get_args(annotation) if a is not type(None)]
        return some[0] if len(some) == 1 else annotation
    return annotation


def is_table(annotation: Any) -> bool:
    """Return whether a type is one of the tables."""
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def is_settable(annotation: Any) -> bool:
    """Return whether a key of this type takes one value (a dictionary of values is one)."""
    is_tables = get_origin(annotation) is dict and is_table(get_args(annotation)[1])
    return not is_table(annotation) and not is_tables


def children(key: KeyPath) -> list[str]:
    """Return the keys below a table, at most twelve."""
    depth = len(key)
    if key[0] in NAMED:
        key = (key[0], "NAME", *key[2:])[: max(depth, 2)]
    return sorted({".".join(k[: len(key) + 1]) for k in all_keys() if k[: len(key)] == key})[:12]


def did_you_mean(key: KeyPath, spell: Callable[[KeyPath], str] = ".".join) -> str:
    """Say which known key is nearest: the same name in another table, or a similar spelling."""
    name = key[1] if len(key) > 2 and key[0] in NAMED else "NAME"
    known = [(k[0], name, *k[2:]) if k[0] in NAMED else k for k in all_keys()]
    tables = sorted({k[0] for k in known})
    same = [k for k in known if k[-1] == key[-1]]
    texts = {".".join(k): k for k in known}
    asked = ".".join(key)
    pool = [".".join(k) for k in same] or list(texts)
    near = difflib.get_close_matches(asked, pool, 1, 0.6 if not same else 0.0)
    if near:
        return f"; did you mean {spell(texts[near[0]])}?"
    table = difflib.get_close_matches(key[0], tables, 1, 0.6)
    if table:
        inside = [k for k in known if k[0] == table[0]]
        lasts = {k[-1]: k for k in inside}
        last = difflib.get_close_matches(key[-1], list(lasts), 1, 0.5)
        if last:
            return f"; did you mean {spell(lasts[last[0]])}?"
        return f"; the keys of {table[0]} are {', '.join('.'.join(k[1:]) for k in inside)}"
    return f"; the tables are {', '.join(tables)}"
