"""The exact bytes of a request."""

from __future__ import annotations

import json
from typing import Any

import pytest

from worker.engines.protocol.request import RequestWriter, body_bytes, body_length, new_rid
from worker.sampling import Sampling
from worker.types import RequestIds

PROMPT = RequestIds([b"3838,374,220,16", b"10,22,30"], 7)


def test_request_bytes_are_golden() -> None:
    head = RequestWriter().head(
        Sampling(temperature=0.7, max_new_tokens=16, seed=5),
        rid="0123456789abcdef0123456789abcdef",
        routing_key="g7",
        salt=3,
    )
    assert body_bytes(head, PROMPT) == (
        b'{"sampling_params":{"temperature":0.7,"top_p":1.0,"top_k":-1,"min_p":0.0,'
        b'"frequency_penalty":0.0,"presence_penalty":0.0,"repetition_penalty":1.0,'
        b'"skip_special_tokens":false,'
        b'"spaces_between_special_tokens":false,"no_stop_trim":true,"max_new_tokens":16,'
        b'"sampling_seed":5},"return_logprob":true,"return_routed_experts":false,'
        b'"return_indexer_topk":false,"stream":false,"rid":"0123456789abcdef0123456789abcdef",'
        b'"routing_key":"g7","extra_key":"v3","input_ids":[3838,374,220,16,10,22,30]}'
    )


def test_request_says_all_that_shapes_the_distribution_and_leaves_out_what_asks_nothing() -> None:
    sampling = Sampling(
        temperature=1.0,
        max_new_tokens=128,
        top_p=0.9,
        top_k=50,
        min_p=0.01,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        repetition_penalty=1.1,
        min_new_tokens=2,
        stop=("</s>",),
        stop_token_ids=(2, 3),
        seed=9,
    )
    head = RequestWriter().head(sampling, rid="r", routing_key="k")
    body = json.loads(body_bytes(head, PROMPT))
    assert body["sampling_params"] == {
        "temperature": 1.0,
        "max_new_tokens": 128,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "min_new_tokens": 2,
        "stop": ["</s>"],
        "stop_token_ids": [2, 3],
        "sampling_seed": 9,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }
    assert "extra_key" not in body  # an unknown version salts nothing


def test_request_of_the_same_parameters_differs_in_seed_budget_and_rid_alone() -> None:
    writer = RequestWriter()
    first = writer.head(Sampling(seed=1, max_new_tokens=8), rid="a" * 32, routing_key="g")
    second = writer.head(Sampling(seed=2, max_new_tokens=9), rid="b" * 32, routing_key="g")
    swapped = first.replace(b'"max_new_tokens":8', b'"max_new_tokens":9')
    swapped = swapped.replace(b'_seed":1', b'_seed":2').replace(b"a" * 32, b"b" * 32)
    assert swapped == second


def test_request_length_is_known_without_joining_it() -> None:
    head = RequestWriter().head(Sampling(), rid=new_rid(), routing_key='a "quoted" ключ')
    for pieces in ([], [b"1"], [b"1,2", b"3", b"4,5"]):
        prompt = RequestIds(pieces, 0)
        body = body_bytes(head, prompt)
        assert len(body) == body_length(head, pieces)
        assert json.loads(body)["routing_key"] == 'a "quoted" ключ'


def test_rid_is_32_hex_and_new_every_time() -> None:
    rids = {new_rid() for _ in range(1000)}
    assert len(rids) == 1000
    assert all(len(rid) == 32 and int(rid, 16) >= 0 for rid in rids)


def test_request_prefix_cache_is_bounded_when_every_prompt_has_parameters_of_its_own() -> None:
    writer = RequestWriter()
    for i in range(3000):
        writer.head(Sampling(temperature=1.0 + i / 1e4), rid="r", routing_key="g")
    assert len(writer._prefixes._known) <= 1024


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"top_k": 5},
        {"min_p": 0.5},
        {"frequency_penalty": 0.5},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"min_new_tokens": 1},
        {"stop": ("x",)},
        {"stop_token_ids": (5,)},
        {"json_schema": "{}"},
        {"regex": "a+"},
        {"ebnf": "root ::= x"},
    ],
)
def test_request_after_one_with_other_parameters_still_carries_its_own(
    change: dict[str, Any],
) -> None:
    writer = RequestWriter()
    plain = writer.head(Sampling(), rid="r", routing_key="g")
    changed = writer.head(Sampling(**change), rid="r", routing_key="g")
    [name], [value] = change.keys(), change.values()
    params = json.loads(body_bytes(changed, PROMPT))["sampling_params"]
    assert params[name] == (list(value) if isinstance(value, tuple) else value)
    assert writer.head(Sampling(), rid="r", routing_key="g") == plain


def test_request_carries_biases_by_the_text_of_their_ids_as_sglang_reads_them() -> None:
    writer = RequestWriter()
    head = writer.head(Sampling(logit_bias=((3, -2.5), (9, 1.0))), rid="r", routing_key="g")
    params = json.loads(body_bytes(head, PROMPT))["sampling_params"]
    assert params["logit_bias"] == {"3": -2.5, "9": 1.0}
    plain = json.loads(body_bytes(writer.head(Sampling(), rid="r", routing_key="g"), PROMPT))
    assert "logit_bias" not in plain["sampling_params"]
