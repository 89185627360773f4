"""Routed experts (R3) and indexer rows: what is asked of an engine, and what its bytes mean.

Owns the shape of a row, where it comes from (settings, or the model's config.json), and the one
decoder. Never asks anything itself, never keeps a row. Invariant: rows that leave here are as many
as the positions that were fed in from their first on, and their bytes and dtype are exactly the
engine's; bytes of any other number are an `EngineFault`, never cut or padded.

Axes: P prompt tokens of one request, C sampled tokens of its reply.
"""

from __future__ import annotations

import binascii
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from rollstream.errors import ConfigError

from ...types import Finish, Replay
from ..faults import Detail, fault

if TYPE_CHECKING:
    from rollstream.settings import Settings

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token")
"""One thing; models write it in two ways."""
_INDEXED_RATIO = 4
"""Of `compress_ratios`: only layers of this ratio have an indexer."""


@dataclass(frozen=True, slots=True)
class RowShape:
    """What one position has."""

    layers: int
    top_k: int = 0
    """0: what the number of bytes says."""


@dataclass(frozen=True, slots=True)
class ReplayShape:
    """Which rows are asked for, and how they are laid out; SGLang's reply says neither."""

    experts: RowShape | None = None
    indexer: RowShape | None = None

    @property
    def bytes_a_token(self) -> int:
        """About what one position takes in a reply, as base64."""
        shapes = [shape for shape in (self.experts, self.indexer) if shape is not None]
        return sum(4 * shape.layers * max(1, shape.top_k) for shape in shapes) * 4 // 3


# --- from the configuration ----------------------------------------------------------------------
def replay_shape(settings: Settings) -> ReplayShape | None:
    """Return what `[engine]` asks for; None where nothing is asked for.

    Raises:
        ConfigError: a shape that neither the settings nor the model's config.json give.
    """
    engine = settings.engine
    if not engine.routed_experts and not engine.indexer_topk:
        return None
    config: Mapping[str, Any] | None = None
    if engine.indexer_topk or not (engine.replay_layers and engine.replay_top_k):
        config = _read_config(settings.model.tokenizer)
    experts = None
    if engine.routed_experts:
        experts = RowShape(
            engine.replay_layers or _number(config, ("num_hidden_layers",), "engine.replay_layers"),
            engine.replay_top_k or _number(config, _EXPERTS_PER_TOKEN, "engine.replay_top_k"),
        )
    return ReplayShape(experts, _indexer_shape(config) if engine.indexer_topk else None)


def _read_config(tokenizer: str) -> dict[str, Any]:
    given = Path(tokenizer)
    path = (given if given.is_dir() else given.parent) / "config.json"
    hint = "give engine.replay_layers and engine.replay_top_k, or the model's folder as model.tokenizer"  # noqa: E501
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"replay data needs the model's shape, and {path} cannot be read ({error}); {hint}"
        ) from None
    inner = config.get("text_config") if isinstance(config, dict) else None
    known = inner if isinstance(inner, dict) else config
    if not isinstance(known, dict):
        raise ConfigError(f"{path} is not a model's configuration; {hint}")
    return known


def _number(config: Mapping[str, Any] | None, names: tuple[str, ...], setting: str) -> int:
    for name in names:
        value = (config or {}).get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    raise ConfigError(
        f"engine.routed_experts: the model's config.json has no {names[0]}; is it a model with "
        f"experts? If so, give {setting}"
    )


def _indexer_shape(config: Mapping[str, Any] | None) -> RowShape:
    known = config or {}
    ratios = known.get("compress_ratios")
    if isinstance(ratios, list):
        layers = sum(ratio == _INDEXED_RATIO for ratio in ratios)
    elif known.get("index_topk"):
        layers = known.get("num_hidden_layers", 0)
    else:
        layers = known.get("num_indexer_layers", 0)
    if not isinstance(layers, int) or layers <= 0:
        raise ConfigError(
            "engine.indexer_topk: the model's config.json names no indexer (index_topk, "
            "compress_ratios, num_indexer_layers); switch it off for this model"
        )
    top_k = known.get("index_topk", 0)
    return RowShape(layers, top_k if isinstance(top_k, int) else 0)


# --- from a reply --------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asked for."""

    shape: ReplayShape
    start: int
    """First position of which rows are wanted."""


class ReplayFields(msgspec.Struct, gc=False):
    """The part of `meta_info` that carries rows, not decoded unless it was asked for."""

    routed_experts: msgspec.Raw = msgspec.Raw()
    indexer_topk: msgspec.Raw = msgspec.Raw()
    indexer_topk_num_layers: int | None = None


def read_experts(
    given: msgspec.Raw, asked: Asked | None, *, num_fed: int, finish: Finish, engine: str
) -> Replay | None:
    """Return the routed experts of an SGLang reply; the server cut them at `asked.start` itself.

    Args:
        given: `meta_info.routed_experts`: base64 of raw int32.
        asked: None: not asked for, and ignored.
        num_fed: P + C - 1: the last sampled token was never fed in.
        finish: an abort before a forward pass brings none.
        engine: for messages.

    Raises:
        EngineFault: `replay_mismatch`: none at all, or other bytes than rows.
    """
    if asked is None or asked.shape.experts is None:
        return None
    num_rows = max(0, num_fed - asked.start)
    raw = _bytes_of(given, "routed_experts", finish, num_rows, engine)
    if raw is None:
        return None
    rows = _rows(raw, num_rows, asked.shape.experts, "routed_experts", engine)
    _check_known(rows, asked.start, engine)
    return Replay(asked.start, rows)


def read_experts_npy(
    given: msgspec.Raw, asked: Asked | None, *, num_fed: int, finish: Finish, engine: str
) -> Replay | None:
    """Return the routed experts of a vLLM reply, in the dtype in which they are served.

    Args:
        given: `choices[0].routed_experts`: base64 of an `.npy` file.
        asked: as for `read_experts`. Servers that know no `routed_experts_prompt_start` send all
            rows, which are as good.
        num_fed: P + C - 1.
        finish: an abort before a forward pass brings none.
        engine: for messages.

    Raises:
        EngineFault: `replay_mismatch`: none at all, no `.npy`, or rows of another number or shape.
    """
    if asked is None or asked.shape.experts is None:
        return None
    num_rows = max(0, num_fed - asked.start)
    raw = _bytes_of(given, "routed_experts", finish, num_rows, engine)
    if raw is None:
        return None
    shape = asked.shape.experts
    if not raw:  # no rows are missing
        return Replay(asked.start, np.empty((0, shape.layers, shape.top_k), np.int32))
    rows = _read_npy(raw, engine)
    wanted = (shape.layers, shape.top_k)
    if rows.ndim != 3 or rows.shape[1:] != wanted or len(rows) not in (num_rows, max(0, num_fed)):
        raise fault(
            Detail.REPLAY_MISMATCH,
            f"{engine}: routed_experts is of shape {rows.shape}, expected {(num_rows, *wanted)}; "
            "are engine.replay_layers and engine.replay_top_k those of the model?",
        )
    start = asked.start if len(rows) == num_rows else 0
    _check_known(rows, start, engine)
    return Replay(start, rows)


def _check_known(rows: npt.NDArray[Any], start: int, engine: str) -> None:
    """Refuse rows that name no expert: -1 throughout is our word for a row that nobody brought."""
    if rows.dtype.kind == "u":
        return
    for place in np.flatnonzero(rows[:, -1, -1] < 0):  # one look at a column is cheap
        if (rows[place] < 0).all():
            raise fault(
                Detail.REPLAY_MISMATCH,
                f"{engine}: routed_experts has no expert for token {start + int(place)}",
            )


def _read_npy(raw: bytes, engine: str) -> npt.NDArray[Any]:
    """Return the array of an `.npy` file as a view of its bytes; objects are never unpickled."""
    file = io.BytesIO(raw)
    try:
        read_header = _NPY_HEADERS[np.lib.format.read_magic(file)]
        shape, is_fortran, dtype = read_header(file)
        if dtype not in _SERVED:
            raise ValueError(f"{dtype} is none of {', '.join(map(str, _SERVED))}")
        start = file.tell()
        if len(raw) - start != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(raw) - start} bytes for {dtype} of shape {shape}")
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise fault(
            Detail.REPLAY_MISMATCH, f"{engine}: routed_experts is not an .npy of numbers: {error}"
        ) from None
    return np.frombuffer(raw, dtype, offset=start).reshape(shape, order="F" if is_fortran else "C")


_NPY_HEADERS: dict[tuple[int, int], Callable[[io.BytesIO], tuple[tuple[int, ...], bool, Any]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_SERVED = tuple(np.dtype(kind) for kind in ("<u1", "<u2", "<i4"))
"""What vLLM serves: the narrowest that holds the number of experts."""


def read_indexer(
    fields: ReplayFields, asked: Asked | None, *, num_fed: int, finish: Finish, engine: str
) -> Replay | None:
    """Return the indexer's rows of a reply, from `asked.start` on: the server sends all of them.

    Raises:
        EngineFault: as `read_experts`.
    """
    if asked is None or asked.shape.indexer is None:
        return None
    shape = asked.shape.indexer
    if fields.indexer_topk_num_layers is not None:
        shape = RowShape(fields.indexer_topk_num_layers, shape.top_k)
    num_rows = max(0, num_fed)
    raw = _bytes_of(fields.indexer_topk, "indexer_topk", finish, num_rows, engine)
    if raw is None:
        return None
    rows = _rows(raw, num_rows, shape, "indexer_topk", engine)
    return Replay(asked.start, rows[asked.start :].copy() if asked.start else rows)


def _bytes_of(
    given: msgspec.Raw, name: str, finish: Finish, num_rows: int, engine: str
) -> bytes | None:
    text = memoryview(given)
    if len(text) and bytes(text[:4]) != b"null":
        try:
            return _decode_base64(text)
        except (ValueError, msgspec.DecodeError) as error:
            raise fault(Detail.REPLAY_MISMATCH, f"{engine}: {name}: {error}") from None
    if finish is Finish.ABORT:
        return None
    if num_rows == 0:
        return b""
    raise fault(
        Detail.REPLAY_MISMATCH,
        f"{engine}: no {name} for {num_rows} rows; was the server started with "
        f"--enable-return-{name.replace('_', '-')}?",
    )


def _decode_base64(text: memoryview) -> bytes:
    """Return the bytes of a JSON text of base64, straight from where it lies in the reply.

    Only a writer that escapes slashes makes it go through a JSON decoder a second time.
    """
    if bytes(text[:1]) != b'"':
        raise ValueError("it is no text")
    try:
        return binascii.a2b_base64(text[1:-1], strict_mode=True)
    except binascii.Error:
        return msgspec.json.decode(text, type=bytes)


def _rows(raw: bytes, num_rows: int, shape: RowShape, name: str, engine: str) -> Any:
    top_k = shape.top_k
    if top_k == 0 and num_rows:
        top_k = len(raw) // (4 * num_rows * shape.layers)
    wanted = 4 * num_rows * shape.layers * top_k
    if len(raw) != wanted or (num_rows and top_k == 0):
        raise fault(
            Detail.REPLAY_MISMATCH,
            f"{engine}: {name} has {len(raw)} bytes, expected {wanted} ({num_rows} rows of "
            f"{shape.layers} layers x {top_k}); are engine.replay_layers and engine.replay_top_k "
            "those of the model?",
        )
    return np.frombuffer(raw, dtype="<i4").reshape(num_rows, shape.layers, top_k)
