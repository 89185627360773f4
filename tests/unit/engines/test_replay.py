"""Replay rows: where their shape comes from, what is asked for, and which bytes are rows."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollstream.errors import ConfigError, EngineFault
from rollstream.settings import Settings
from tests.scripted_engine import a_reply
from worker.engines.faults import Detail
from worker.engines.protocol.replay import Asked, ReplayShape, RowShape, replay_shape
from worker.engines.protocol.reply import read_reply
from worker.engines.protocol.request import RequestWriter, body_bytes
from worker.sampling import Sampling
from worker.types import Completion, RequestIds

EXPERTS = ReplayShape(experts=RowShape(2, 4))
ABORT = {"type": "abort", "message": "paused", "status_code": None}


def rows_of(count: int, layers: int = 2, top_k: int = 4, first: int = 0) -> Any:
    return np.arange(first, first + count * layers * top_k, dtype="<i4").reshape(
        count, layers, top_k
    )


def base64_of(rows: Any) -> str:
    return base64.b64encode(rows.astype("<i4").tobytes()).decode()


def read(asked: Asked | None, **meta: Any) -> Completion:
    """Read the reply to 7 prompt ids: 5 sampled ids, so 11 positions were fed in."""
    return read_reply(200, a_reply(**meta), rid="r", engine="http://e", num_prompt=7, version=0,
                      max_token_id=151668, replay=asked)  # fmt: skip


# --- the shape -----------------------------------------------------------------------------------
def settings(folder: Path | str = "", **engine: Any) -> Settings:
    return Settings.model_validate({"model": {"tokenizer": str(folder)}, "engine": engine})


def a_model(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_nothing_is_asked_for_unless_the_settings_say_so() -> None:
    assert replay_shape(settings()) is None


def test_a_shape_that_is_given_needs_no_model() -> None:
    given = settings("/nowhere", routed_experts=True, replay_layers=48, replay_top_k=8)
    assert replay_shape(given) == ReplayShape(RowShape(48, 8))


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 48, "num_experts_per_tok": 8},
        {"num_hidden_layers": 48, "num_experts_per_token": 8},
        {
            "num_hidden_layers": 2,
            "text_config": {"num_hidden_layers": 48, "num_experts_per_tok": 8},
        },
    ],
)
def test_the_models_own_configuration_gives_the_shape(tmp_path: Path, config: Any) -> None:
    folder = a_model(tmp_path, **config)
    given = settings(folder, routed_experts=True)
    assert replay_shape(given) == ReplayShape(RowShape(48, 8))
    given = settings(folder / "tokenizer.json", routed_experts=True)
    assert replay_shape(given) == ReplayShape(RowShape(48, 8))
    given = settings(folder, routed_experts=True, replay_layers=47)
    assert replay_shape(given) == ReplayShape(RowShape(47, 8))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config.json cannot be read"),
        ("no json", "config.json cannot be read"),
        ("[]", "is not a model's configuration"),
        ('{"num_hidden_layers": 28}', "no num_experts_per_tok; is it a model with experts"),
        ('{"num_experts_per_tok": 8}', "no num_hidden_layers"),
        ('{"num_hidden_layers": 28, "num_experts_per_tok": true}', "no num_experts_per_tok"),
    ],
)
def test_a_shape_that_nobody_knows_is_an_error_at_start(
    tmp_path: Path, config: str | None, message: str
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=message) as caught:
        replay_shape(settings(tmp_path, routed_experts=True))
    assert "engine.replay_" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"num_hidden_layers": 61, "index_topk": 2048}, RowShape(61, 2048)),
        ({"compress_ratios": [0, 4, 128, 4], "index_topk": 512}, RowShape(2, 512)),
        ({"num_indexer_layers": 3}, RowShape(3, 0)),
    ],
)
def test_12_an_indexers_layers_come_from_the_models_configuration(
    tmp_path: Path, config: Any, shape: RowShape
) -> None:
    given = settings(a_model(tmp_path, **config), indexer_topk=True)
    assert replay_shape(given) == ReplayShape(None, shape)


def test_12_a_model_without_an_indexer_is_an_error_at_start(tmp_path: Path) -> None:
    folder = a_model(tmp_path, num_hidden_layers=2, num_experts_per_tok=2)
    with pytest.raises(ConfigError, match="names no indexer"):
        replay_shape(settings(folder, indexer_topk=True))


# --- the request ---------------------------------------------------------------------------------
def body_of(asked: Asked | None) -> bytes:
    head = RequestWriter().head(Sampling(seed=5), rid="r", routing_key="k", replay=asked)
    return body_bytes(head, RequestIds([b"1,2"], 2, None if asked is None else asked.start))


def test_11_a_request_without_replay_has_the_bytes_that_it_always_had() -> None:
    assert body_of(None) == (
        b'{"sampling_params":{"temperature":1.0,"top_p":1.0,"top_k":-1,"min_p":0.0,'
        b'"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,'
        b'"skip_special_tokens":false,'
        b'"spaces_between_special_tokens":false,"no_stop_trim":true,"max_new_tokens":1024,'
        b'"sampling_seed":5},"return_logprob":true,"return_routed_experts":false,'
        b'"return_indexer_topk":false,"stream":false,"rid":"r","routing_key":"k",'
        b'"input_ids":[1,2]}'
    )


def test_a_request_for_rows_differs_in_these_fields_alone() -> None:
    plain = json.loads(body_of(None))
    experts = json.loads(body_of(Asked(EXPERTS, 17)))
    assert experts == plain | {"return_routed_experts": True, "routed_experts_start_len": 17}
    indexer = json.loads(body_of(Asked(ReplayShape(None, RowShape(3)), 17)))
    assert indexer == plain | {"return_indexer_topk": True}
    both = json.loads(body_of(Asked(ReplayShape(RowShape(2, 4), RowShape(3)), 0)))
    assert both == plain | {
        "return_routed_experts": True, "routed_experts_start_len": 0, "return_indexer_topk": True,
    }  # fmt: skip


# --- the reply -----------------------------------------------------------------------------------
def test_11_the_rows_are_the_served_buffer() -> None:
    rows = rows_of(11)
    got = read(Asked(EXPERTS, 0), routed_experts=base64_of(rows)).routed_experts
    assert got is not None
    assert got.start == 0
    assert got.rows.shape == (11, 2, 4)
    assert got.rows.dtype == np.int32
    assert got.rows.tobytes() == rows.tobytes()


def test_11_rows_that_nobody_asked_for_are_none() -> None:
    got = read(None, routed_experts=base64_of(rows_of(11)), indexer_topk="not even base64")
    assert got.routed_experts is None
    assert got.indexer_topk is None


@pytest.mark.parametrize("start", [1, 6, 10, 11])
def test_69_rows_begin_where_they_were_asked_for(start: int) -> None:
    rows = rows_of(11 - start)
    got = read(Asked(EXPERTS, start), routed_experts=base64_of(rows)).routed_experts
    assert got is not None
    assert (got.start, got.rows.shape) == (start, (11 - start, 2, 4))


@pytest.mark.parametrize(
    "given",
    [
        base64_of(rows_of(10)),
        base64_of(rows_of(12)),
        base64_of(rows_of(11, top_k=3)),
        base64_of(rows_of(11, layers=3)),
        base64.b64encode(rows_of(11).tobytes()[:-1]).decode(),
        "",
        "no base64!",
        5,
        [1, 2],
        None,
    ],
)
def test_other_bytes_than_rows_are_a_fault_and_nothing_is_cut_or_padded(given: Any) -> None:
    with pytest.raises(EngineFault) as caught:
        read(Asked(EXPERTS, 0), routed_experts=given)
    assert caught.value.detail == Detail.REPLAY_MISMATCH
    assert not caught.value.retryable


def test_a_server_that_serves_no_rows_is_told_by_the_flag_that_it_lacks() -> None:
    with pytest.raises(EngineFault, match="--enable-return-routed-experts"):
        read(Asked(EXPERTS, 0))
    indexer = ReplayShape(None, RowShape(3))
    with pytest.raises(EngineFault, match="--enable-return-indexer-topk"):
        read(Asked(indexer, 0))


def test_an_abort_before_a_forward_pass_has_no_rows_and_one_behind_it_has_them() -> None:
    before = read(Asked(EXPERTS, 0), ids=(), finish=ABORT)
    assert before.routed_experts is None
    behind = read(
        Asked(EXPERTS, 0), ids=(5,), finish=ABORT, routed_experts=base64_of(rows_of(7))
    ).routed_experts
    assert behind is not None
    assert len(behind.rows) == 7
    with pytest.raises(EngineFault):
        read(Asked(EXPERTS, 0), ids=(5,), finish=ABORT, routed_experts=base64_of(rows_of(6)))


def test_12_an_indexers_rows_are_cut_at_the_start_since_the_server_sends_them_all() -> None:
    rows = rows_of(11, layers=3, top_k=5)
    shape = ReplayShape(None, RowShape(3, 5))
    got = read(Asked(shape, 4), indexer_topk=base64_of(rows)).indexer_topk
    assert got is not None
    assert got.start == 4
    assert np.array_equal(got.rows, rows[4:])


def test_12_layers_in_the_reply_win_and_the_width_is_what_the_bytes_say() -> None:
    rows = rows_of(11, layers=7, top_k=5)
    shape = ReplayShape(None, RowShape(3))
    got = read(
        Asked(shape, 0), indexer_topk=base64_of(rows), indexer_topk_num_layers=7
    ).indexer_topk
    assert got is not None
    assert np.array_equal(got.rows, rows)
    with pytest.raises(EngineFault):
        read(Asked(shape, 0), indexer_topk=base64_of(rows[:, :, :4]), indexer_topk_num_layers=9)


def test_12_no_rows_are_an_empty_array() -> None:
    shape = ReplayShape(RowShape(2, 4), RowShape(3, 5))
    got = read_reply(200, a_reply([]), rid="r", engine="http://e", num_prompt=1, version=0,
                     max_token_id=9, replay=Asked(shape, 0))  # fmt: skip
    assert got.routed_experts is not None
    assert got.indexer_topk is not None
    assert got.routed_experts.rows.shape == (0, 2, 4)
    assert got.indexer_topk.rows.shape == (0, 3, 5)


@pytest.mark.parametrize(("start", "place"), [(0, 3), (4, 0), (4, 6)])
def test_a_row_without_any_expert_is_no_row(start: int, place: int) -> None:
    """-1 throughout is what a sample has where nobody brought a row."""
    rows = rows_of(11 - start)
    rows[place] = -1
    with pytest.raises(EngineFault, match=rf"no expert for token {start + place}$") as caught:
        read(Asked(EXPERTS, start), routed_experts=base64_of(rows))
    assert caught.value.detail == Detail.REPLAY_MISMATCH
    rows[place, 0] = 5  # one layer routed: a row, however the others are filled
    got = read(Asked(EXPERTS, start), routed_experts=base64_of(rows)).routed_experts
    assert got is not None
    assert np.array_equal(got.rows, rows)
