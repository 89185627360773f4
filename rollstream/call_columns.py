"""The calls of a trajectory as columns: how the codec writes provenance.

Owns that one layout. Never knows what else a body holds. Invariant: calls come back as they were;
columns that do not fit each other, or that would grow far beyond their bytes, are a `ValueError`.
"""

from __future__ import annotations

import operator
from dataclasses import MISSING, fields
from itertools import chain
from typing import Any

from rollstream.plain import check_ints
from rollstream.sample import Call

_CALL_NAMES = tuple(f.name for f in fields(Call))
_CALL_PLAIN = tuple(n for n in _CALL_NAMES if n not in ("start", "end", "versions", "sampling"))
_CALL_DEFAULTS = {f.name: (f.default,) for f in fields(Call) if f.default is not MISSING}
_call_values = operator.attrgetter("start", "end", "versions", "sampling", *_CALL_PLAIN)
MAX_CALL_VALUES = 1 << 19
"""Calls times sampling parameters in one trajectory."""


def encode_calls(calls: list[Call]) -> list[Any]:
    """Calls as columns: a trajectory of many turns repeats all but ids, spans and seeds."""
    if not calls:
        return [[], [], [], {}]
    if len(calls) == 1:
        return _encode_one_call(calls[0])
    columns = map(list, zip(*map(_call_values, calls), strict=True))
    starts, ends, versions, samplings, *plain = columns
    spans = [
        v[0][0] if len(v) == 1 and (v[0][1], v[0][2]) == (start, end) else v
        for v, start, end in zip(versions, starts, ends, strict=True)
    ]
    named = {name: _column(values) for name, values in zip(_CALL_PLAIN, plain, strict=True)}
    return [starts, ends, spans, {**named, "sampling": _sampling_columns(samplings)}]


def _encode_one_call(call: Call) -> list[Any]:
    """Columns of one value each: most trajectories are a single call."""
    start, end, versions, sampling, *plain = _call_values(call)
    whole = len(versions) == 1 and (versions[0][1], versions[0][2]) == (start, end)
    named: dict[str, Any] = {n: [v] for n, v in zip(_CALL_PLAIN, plain, strict=True)}
    named["sampling"] = {n: [v] for n, v in sampling.items()} if sampling else [sampling]
    return [[start], [end], [versions[0][0] if whole else versions], named]


def _column(values: list[Any]) -> list[Any]:
    """Return one value where all are equal."""
    return values[:1] if values.count(values[0]) == len(values) else values


def _sampling_columns(samplings: list[dict[str, Any]]) -> dict[str, Any] | list[Any]:
    names = tuple(samplings[0])
    if not names or sum(map(len, samplings)) != len(names) * len(samplings):
        return samplings
    try:
        return {name: _column([sampling[name] for sampling in samplings]) for name in names}
    except KeyError:
        return samplings


def decode_calls(record: list[Any]) -> list[Call]:
    """Return what `encode_calls` was given.

    Raises:
        ValueError: columns of other lengths or types (a LookupError or TypeError for no columns).
    """
    starts, ends, spans, columns = record[:4]
    count = len(starts)
    if count == 0:
        return []
    if count == 1:
        call = _decode_one_call(starts[0], ends[0], spans[0], columns)
        check_ints((call.start, call.end, *chain(*call.versions)), "a call's places")
        return [call]
    if count * max(1, len(columns.get("sampling", ()))) > MAX_CALL_VALUES:
        # Columns of one value are short on the wire and as long as the others here.
        raise ValueError(f"{count} calls with more parameters than any trajectory has")
    versions = [
        [(v, start, end)] if isinstance(v, int) else [(row[0], row[1], row[2]) for row in v]
        for v, start, end in zip(spans, starts, ends, strict=True)
    ]
    check_ints([*starts, *ends, *chain(*chain(*versions))], "the places of calls")
    values = {"start": starts, "end": ends, "versions": versions}
    values["sampling"] = _spread_samplings(columns.get("sampling", [{}]), count)
    for name in _CALL_PLAIN:
        values[name] = _spread(columns.get(name, _CALL_DEFAULTS.get(name, ())), count)
    return list(map(Call, *(values[name] for name in _CALL_NAMES)))


def _decode_one_call(start: int, end: int, span: Any, columns: dict[str, Any]) -> Call:
    sampling = columns.get("sampling", [{}])
    return Call(
        start=start,
        end=end,
        versions=[(span, start, end)]
        if isinstance(span, int)
        else [(row[0], row[1], row[2]) for row in span],
        sampling={name: column[0] for name, column in sampling.items()}
        if isinstance(sampling, dict)
        else dict(sampling[0]),
        **{name: columns[name][0] for name in _CALL_PLAIN if name in columns},
    )


def _spread(column: Any, count: int) -> list[Any]:
    if len(column) == 1:
        return list(column) * count
    if len(column) != count:
        raise ValueError(f"a column of {len(column)} for {count} calls")
    return list(column)


def _spread_samplings(columns: Any, count: int) -> list[dict[str, Any]]:
    if not isinstance(columns, dict):
        return [dict(sampling) for sampling in _spread(columns, count)]
    shared = {name: column[0] for name, column in columns.items()}
    own = {name: _spread(column, count) for name, column in columns.items() if len(column) > 1}
    if not own:
        return [shared.copy() for _ in range(count)]
    rows = zip(*own.values(), strict=True)
    return [{**shared, **dict(zip(own, row, strict=True))} for row in rows]
