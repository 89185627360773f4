"""The one table of replies, row by row, in the bytes of both protocols."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import EngineFault
from tests.scripted_engine import a_reply, a_vllm_completion, a_vllm_reply
from worker.engines.faults import REPLIES, RULES, Action, Detail
from worker.engines.protocol.http_base import Sent
from worker.engines.protocol.replay import Asked, ReplayShape, RowShape
from worker.engines.protocol.reply import read_reply
from worker.engines.protocol.versions import VersionMap
from worker.engines.protocol.vllm_reply import read_vllm_reply
from worker.engines.protocol.vllm_request import Route
from worker.types import Completion, Finish

RID, ENGINE, MAX_ID, NUM_PROMPT, BUDGET = "f" * 32, "http://e", 151668, 7, 8
EXPERTS = Asked(ReplayShape(RowShape(2, 3)), 2)
NUM_ROWS = NUM_PROMPT + 5 - 1 - EXPERTS.start
ROWS = np.arange(NUM_ROWS * 6, dtype=np.int32).reshape(NUM_ROWS, 2, 3)
Read = Callable[..., Completion]


def read_sglang(raw: bytes, *, status: int = 200, asked: Asked | None = None) -> Completion:
    return read_reply(
        status,
        raw,
        rid=RID,
        engine=ENGINE,
        num_prompt=NUM_PROMPT,
        version=0,
        max_token_id=MAX_ID,
        max_new_tokens=BUDGET,
        replay=asked,
    )


def read_vllm(
    raw: bytes,
    *,
    status: int = 200,
    asked: Asked | None = None,
    route: Route = Route.GENERATE,
    versions: VersionMap | None = None,
) -> Completion:
    return read_vllm_reply(
        status,
        raw,
        Sent(RID, ENGINE, NUM_PROMPT, 0, BUDGET, asked),
        route=route,
        max_token_id=MAX_ID,
        versions=versions or VersionMap(),
    )


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


def raw_rows(array: Any) -> str:
    return base64.b64encode(array.astype("<i4").tobytes()).decode()


def spans(*pairs: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"version": str(n), "start": a, "end": b} for n, (a, b) in enumerate(pairs)]


def entries(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    return {"content": [{"token_id": token, "logprob": value} for token, value in pairs]}


def with_top(raw: bytes, **fields: Any) -> bytes:
    return json.dumps(json.loads(raw) | fields).encode()


IDS = [59, 79075, 90, 23, 92]
OK = [-0.5] * 5
ABORT = {"type": "abort", "message": "x"}
GAP, OVERLAP, SHORT = spans((0, 2), (3, 5)), spans((0, 3), (2, 5)), spans((0, 2), (2, 4))
Pair = tuple[Any, Any]
BYTES: dict[str, Pair] = {
    "not_json": (a_reply()[:-1] + b",,", a_vllm_reply()[:-1] + b",,"),
    "error_200": (b'{"error":{"message":"x"}}', b'{"error":{"message":"x","code":400}}'),
    "logprob_nan": (
        a_reply(log_probs=[*OK[:4], float("nan")]),
        a_vllm_reply(log_probs=[*OK[:4], float("nan")]),
    ),
    "abort": (a_reply(finish=ABORT), a_vllm_reply(finish="abort")),
    "abort_empty": (
        json.dumps({"text": "", "meta_info": {"id": RID, "finish_reason": ABORT}}).encode(),
        json.dumps({"choices": [{"index": 0, "finish_reason": "abort"}]}).encode(),
    ),
    "logprobs_missing": (a_reply(output_token_logprobs=None), a_vllm_reply(logprobs=None)),
    "logprobs_short": (a_reply(log_probs=OK[:4]), a_vllm_reply(log_probs=OK[:4])),
    "logprob_null": (a_reply(log_probs=[None, *OK[:4]]), a_vllm_reply(log_probs=[None, *OK[:4]])),
    "logprobs_long": (
        a_reply(IDS[:4], output_token_logprobs=[[-0.5, i, None] for i in IDS], completion_tokens=4),
        a_vllm_reply(IDS[:4], logprobs=entries([(i, -0.5) for i in IDS])),
    ),
    "completion_tokens": (
        a_reply(completion_tokens=6),
        with_top(a_vllm_reply(), usage={"completion_tokens": 6}),
    ),
    "other_ids": (
        a_reply(output_token_logprobs=[[-0.5, i, None] for i in (*IDS[:4], 7)]),
        a_vllm_reply(logprobs=entries([(i, -0.5) for i in (*IDS[:4], 7)])),
    ),
    "unnamed_ids": (None, a_vllm_reply(logprobs=entries([(None, -0.5)] * 5))),
    "other_rid": (a_reply(id="e" * 32), with_top(a_vllm_reply(), request_id="e" * 32)),
    "prompt_cut": (a_reply(prompt_tokens=6), a_vllm_reply(prompt_tokens=6)),
    "choices": (None, with_top(a_vllm_reply(), choices=[])),
    "spans_gap": (a_reply(weight_versions=GAP), a_vllm_reply(weight_versions=GAP)),
    "spans_overlap": (a_reply(weight_versions=OVERLAP), a_vllm_reply(weight_versions=OVERLAP)),
    "spans_short": (a_reply(weight_versions=SHORT), a_vllm_reply(weight_versions=SHORT)),
    "no_finish": (a_reply(drop=["finish_reason"]), a_vllm_reply(drop=["finish_reason"])),
    "unknown_finish": (a_reply(finish={"type": "tool_calls"}), a_vllm_reply(finish="repetition")),
    "nan": (a_reply(finish={"type": "stop", "matched": "NaN happened"}), None),
    "abort_code": (a_reply(finish=ABORT | {"status_code": 503}), None),
    "abort_429": (a_reply(finish=ABORT | {"status_code": 429}), None),
    "abort_400": (a_reply(finish=ABORT | {"status_code": 400}), None),
    "logprob_positive": (a_reply(log_probs=[0.1, *OK[:4]]), a_vllm_reply(log_probs=[0.1, *OK[:4]])),
    "logprob_lowest": (
        a_reply(log_probs=[-9999.0, *OK[:4]]),
        a_vllm_reply(log_probs=[-9999.0, *OK[:4]]),
    ),
    "bad_token": (a_reply([MAX_ID + 1]), a_vllm_reply([MAX_ID + 1])),
    "negative_token": (a_reply([-1]), a_vllm_reply([-1])),
    "empty_length": (
        a_reply([], finish={"type": "length", "length": 0}),
        a_vllm_reply([], finish="length"),
    ),
    "too_many": (a_reply(range(9)), a_vllm_reply(range(9))),
}
ROW_BYTES: dict[str, Pair] = {
    "experts_missing": (a_reply(), a_vllm_reply()),
    "experts_short": (
        a_reply(routed_experts=raw_rows(ROWS[1:])),
        a_vllm_reply(routed_experts=npy(ROWS[1:])),
    ),
    "experts_garbage": (
        a_reply(routed_experts="?"),
        a_vllm_reply(routed_experts=base64.b64encode(b"rows").decode()),
    ),
}
STATUSES = {
    "400": [301, 400, 401, 404, 422],
    "overflow": [400, 413],
    "503": [408, 429, 502, 503, 504],
    "500": [500, 501],
}
OVER_HTTP = {
    "half_body", "reset", "hang", "abort_late", "too_large", "connect", "no_engine", "stream_cut",
    "stream_changes", "stream_goes_on",
}  # fmt: skip
"""Rows without a whole reply: tests/integration/engines; of streams: test_streams.py here."""
CASES = [
    (name, read, raw, None)
    for name, pair in BYTES.items()
    for read, raw in zip((read_sglang, read_vllm), pair, strict=True)
    if raw is not None
] + [
    (name, read, raw, EXPERTS)
    for name, pair in ROW_BYTES.items()
    for read, raw in zip((read_sglang, read_vllm), pair, strict=True)
]
both = pytest.mark.parametrize("read", [read_sglang, read_vllm])


def test_every_row_of_the_table_is_tried() -> None:
    assert set(REPLIES) == {*BYTES, *ROW_BYTES, *STATUSES, *OVER_HTTP}
    assert {seen.detail for seen in REPLIES.values()} - {None} == set(Detail)


@pytest.mark.parametrize(("name", "read", "raw", "asked"), CASES)
def test_a_reply_of_the_table_has_its_one_action_in_either_protocol(
    name: str, read: Read, raw: bytes, asked: Asked | None
) -> None:
    seen = REPLIES[name]
    if seen.detail is None:
        assert read(raw, asked=asked).finish is Finish.ABORT
        assert seen.action is Action.RESUME
        return
    with pytest.raises(EngineFault) as caught:
        read(raw, asked=asked)
    assert caught.value.detail == seen.detail
    assert caught.value.retryable is RULES[seen.detail].retryable
    assert seen.action in (Action.FAULT, Action.RETRY, Action.REFUSE)


@both
@pytest.mark.parametrize("name", STATUSES)
def test_a_status_has_one_name_in_either_protocol(read: Read, name: str) -> None:
    words = b"maximum context length" if name == "overflow" else b"no words"
    for status in STATUSES[name]:
        with pytest.raises(EngineFault) as caught:
            read(b'{"error":{"message":"%b"}}' % words, status=status)
        assert caught.value.detail == REPLIES[name].detail


def test_what_the_actions_mean_is_what_the_rules_do() -> None:
    for rule in RULES.values():
        assert rule.again is (rule.action in (Action.RETRY, Action.FAULT))
        if rule.action is Action.REFUSE:
            assert not rule.retryable
            assert not rule.stop_first
    faults = {detail for detail, rule in RULES.items() if rule.action is Action.FAULT}
    assert Detail.UNKNOWN_FINISH in faults
    believed = {detail for name, seen in REPLIES.items() if (detail := seen.detail) in faults}
    assert believed == faults


# --- replies of vLLM that are believed -----------------------------------------------------------
@both
def test_spans_that_end_behind_the_ids_are_a_fault(read: Read) -> None:
    make = a_reply if read is read_sglang else a_vllm_reply
    with pytest.raises(EngineFault, match="do not cover 5 tokens"):
        read(make(weight_versions=spans((0, 2), (2, 6))))


@pytest.mark.parametrize("indexes", [[1], [0, 1], [0, 0]])
def test_a_vllm_reply_of_other_choices_than_the_one_is_a_fault(indexes: list[int]) -> None:
    one = json.loads(a_vllm_reply())["choices"][0]
    with pytest.raises(EngineFault) as caught:
        read_vllm(with_top(a_vllm_reply(), choices=[one | {"index": i} for i in indexes]))
    assert caught.value.detail == REPLIES["choices"].detail


def test_an_older_vllm_names_ids_in_words() -> None:
    content = [{"token": f"token_id:{i}", "logprob": -0.5} for i in IDS]
    assert read_vllm(a_vllm_reply(logprobs={"content": content})).ids.tolist() == IDS
    content[3]["token"] = "token_id:24"
    with pytest.raises(EngineFault, match="output id 3 is 23, its log-prob is of 24"):
        read_vllm(a_vllm_reply(logprobs={"content": content}))
    content[3]["token"] = "text"
    with pytest.raises(EngineFault, match="4 log-probs that say of which id"):
        read_vllm(a_vllm_reply(logprobs={"content": content}))


def test_56_a_vllm_without_versions_or_usage_is_believed_under_an_unknown_version() -> None:
    got = read_vllm(a_vllm_reply(drop=["usage", "weight_versions"]))
    assert got.versions == [(-1, 0, 5)]
    assert (got.cache.cached_tokens, got.cache.total_prompt_tokens) == (0, 7)


def test_a_vllm_reply_carries_its_counters() -> None:
    usage = {
        "prompt_tokens": 7, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4},
    }  # fmt: skip
    drafts = {"num_spec_steps": 3, "num_accepted_draft_tokens": 10, "num_draft_tokens": 15}
    metrics = {"speculative_decoding": drafts | {"acceptance_histogram": [1, 2]}}
    got = read_vllm(with_top(a_vllm_reply(), usage=usage, metrics=metrics))
    assert (got.cache.cached_tokens, got.cache.total_prompt_tokens) == (4, 7)
    usage["prompt_tokens_details"] = {"cached_tokens": 4000}
    assert read_vllm(with_top(a_vllm_reply(), usage=usage)).cache.cached_tokens == 7
    spec = got.spec
    assert (spec.spec_accept_token_num, spec.spec_draft_token_num, spec.spec_verify_ct) == (
        10,
        15,
        3,
    )


@pytest.mark.parametrize(
    ("finish", "stop_reason", "matched"),
    [("stop", None, 92), ("stop", 7, 7), ("stop", "</s>", "</s>"), ("length", None, None)],
)
def test_63_what_ended_a_vllm_reply_is_its_last_id_where_it_does_not_say(
    finish: str, stop_reason: Any, matched: Any
) -> None:
    assert read_vllm(a_vllm_reply(finish=finish, stop_reason=stop_reason)).matched == matched


def test_59_prompt_ids_that_come_back_are_as_many_as_were_sent() -> None:
    good = with_top(a_vllm_reply(), prompt_token_ids=list(range(7)))
    assert len(read_vllm(good).ids) == 5
    for wrong in ([], [1], list(range(8))):
        for raw in (
            with_top(a_vllm_reply(), prompt_token_ids=wrong),
            a_vllm_reply(prompt_token_ids=wrong),
        ):
            with pytest.raises(EngineFault) as caught:
                read_vllm(raw)
            assert caught.value.detail == Detail.PROMPT_MISMATCH


def test_the_id_of_a_vllm_reply_is_ours_with_the_prefix_of_its_route() -> None:
    tokens, text = a_vllm_reply(), a_vllm_completion()
    read_vllm(with_top(tokens, request_id=f"generate-tokens-{RID}"))
    read_vllm(with_top(text, id=f"cmpl-{RID}"), route=Route.COMPLETIONS)
    for raw, route in (
        (with_top(tokens, request_id=RID), Route.GENERATE),
        (with_top(text, id=f"generate-tokens-{RID}"), Route.COMPLETIONS),
    ):
        with pytest.raises(EngineFault, match="with the reply of"):
            read_vllm(raw, route=route)


def test_65_log_probs_of_vllm_are_bit_equal_to_the_float32_it_had() -> None:
    exact = np.random.default_rng(0).uniform(-20, 0, 8).astype(np.float32)
    got = read_vllm(a_vllm_reply(range(8), log_probs=[float(p) for p in exact]))
    assert got.log_probs.tobytes() == exact.tobytes()
    assert not got.ids.flags.writeable
    assert not got.log_probs.flags.writeable


# --- replay rows of vLLM -------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
@pytest.mark.parametrize("start", [0, 2])
def test_11_rows_of_vllm_keep_the_dtype_in_which_they_are_served(dtype: str, start: int) -> None:
    num_fed = NUM_PROMPT + 5 - 1
    rows = np.arange(num_fed * 6).reshape(num_fed, 2, 3).astype(dtype)
    for first in (start, 0):  # a server that knows no start sends all of them
        got = read_vllm(
            a_vllm_reply(routed_experts=npy(rows[first:])), asked=Asked(EXPERTS.shape, start)
        ).routed_experts
        assert got is not None
        assert (got.start, got.rows.dtype) == (first, np.dtype(dtype))
        assert got.rows.tolist() == rows[first:].tolist()


@pytest.mark.parametrize(
    "array",
    [
        np.array([{"a": 1}] * NUM_ROWS * 6, object).reshape(NUM_ROWS, 2, 3),
        ROWS.astype(np.int64),
        ROWS.astype(np.float32),
        ROWS.reshape(NUM_ROWS, 6),
        ROWS.reshape(NUM_ROWS, 3, 2),
        ROWS.astype(">i4"),
        np.full_like(ROWS, -1),
    ],
)
def test_rows_of_vllm_that_are_no_rows_are_refused_and_nothing_is_unpickled(array: Any) -> None:
    with pytest.raises(EngineFault) as caught:
        read_vllm(a_vllm_reply(routed_experts=npy(array)), asked=EXPERTS)
    assert caught.value.detail == Detail.REPLAY_MISMATCH


def test_rows_of_vllm_in_column_order_are_read_in_it() -> None:
    got = read_vllm(a_vllm_reply(routed_experts=npy(np.asfortranarray(ROWS))), asked=EXPERTS)
    assert got.routed_experts is not None
    assert got.routed_experts.rows.tolist() == ROWS.tolist()


def test_an_abort_of_vllm_before_a_forward_pass_has_no_rows() -> None:
    got = read_vllm(a_vllm_reply([], finish="abort", routed_experts=None), asked=EXPERTS)
    assert (len(got.ids), got.routed_experts) == (0, None)


@both
def test_the_base64_of_rows_goes_through_json_once(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = np.full_like(ROWS, 0x3F3F3F3F)  # whose base64 has slashes
    text = raw_rows(rows) if read is read_sglang else npy(rows)
    raw = (a_reply if read is read_sglang else a_vllm_reply)(routed_experts=text)
    escaped = raw.replace(b"/", b"\\/")
    assert escaped != raw
    again = Mock(wraps=msgspec.json.decode)
    monkeypatch.setattr(msgspec.json, "decode", again)
    for body, times in ((raw, 0), (escaped, 1)):
        got = read(body, asked=EXPERTS).routed_experts
        assert got is not None
        assert got.rows.tolist() == rows.tolist()
        assert again.call_count == times


# --- anything at all -----------------------------------------------------------------------------
WILD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["stop", "abort", "7", f"generate-tokens-{RID}", RID]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of everything inside a JSON value."""
    found: list[tuple[Any, Any]] = []
    if isinstance(node, dict | list):
        found = list(node.items() if isinstance(node, dict) else enumerate(node))
    return [path, *(p for key, inner in found for p in places(inner, (*path, key)))]


def replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = replaced(node[path[0]], path[1:], value)
    return copy


ROUTES: list[tuple[Read, bytes]] = [
    (read_sglang, a_reply(prompt_tokens=7, id=RID, weight_versions=spans((0, 2), (2, 5)))),
    (read_vllm, a_vllm_reply(prompt_tokens=7, weight_versions=spans((0, 2), (2, 5)))),
    (lambda raw, **kw: read_vllm(raw, route=Route.COMPLETIONS, **kw), a_vllm_completion()),
]


@given(data=st.data(), route=st.sampled_from(range(3)))
@settings(max_examples=300, deadline=None)
def test_a_reply_with_anything_anywhere_is_believed_whole_or_is_a_fault(
    data: st.DataObject, route: int
) -> None:
    read, good = ROUTES[route]
    body = json.loads(good)
    for _ in range(data.draw(st.integers(1, 2))):
        body = replaced(body, data.draw(st.sampled_from(places(body))), data.draw(WILD))
        if not isinstance(body, dict | list):
            break
    try:
        got = read(json.dumps(body).encode())
    except EngineFault:
        return
    count = len(got.ids)
    assert len(got.log_probs) == count <= BUDGET
    assert np.isfinite(got.log_probs).all()
    assert ((got.ids >= 0) & (got.ids <= MAX_ID)).all()
    assert got.json == b",".join(b"%d" % i for i in got.ids.tolist())
    behind = 0
    for version, start, end in got.versions:
        assert start == behind < end
        assert -1 <= version < 2**63
        behind = end
    assert behind == count
