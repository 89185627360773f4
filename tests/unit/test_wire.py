"""The codec: what goes in comes out, and whatever is not ours is refused as a `WireError`."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np
import pytest

from rollstream import wire
from rollstream.errors import Status, StopReason, WireError
from rollstream.group import EnvRule, MemberHeader, PromptGroup
from rollstream.sample import SAMPLE_FIELDS, Call, PrefixCacheInfo, Sample, Span, SpecInfo
from tests.builders import a_prompt, a_sample

GROUP = a_prompt(3, n=4)
FULL: dict[str, Any] = {
    "group_index": 3,
    "member": 1,
    "prompt": GROUP.prompt,
    "label": GROUP.label,
    "response": "8 \u20ac\x00 <|im_end|>",
    "metadata": {"a": [1, 2.5, None, True], "b": {"c": "ü"}},
    "train_metadata": {"x": 1},
    "generate_function_path": "pkg.module:name",
    "reward_spec": {"kind": "math"},
    "routing_key": "k",
    "remove_sample": True,
    "non_generation_time": 1.25,
    "spec_info": SpecInfo(1, 2, 3, 4),
    "prefix_cache_info": PrefixCacheInfo(5, 6),
    "rollout_routed_experts": np.arange(4 * 2 * 2, dtype=np.int32).reshape(4, 2, 2),
    "rollout_indexer_topk": np.arange(8, dtype=np.uint8).reshape(4, 2),
    "teacher_log_probs": np.array([-0.25, -0.5], np.float32),
    "opd_reverse_kl": np.array([0.125, -3.0], np.float32),
    "multimodal_inputs": {"images": ["a.png"]},
    "multimodal_train_inputs": {"grid": [1, 2]},
    "adapter": "lora-1",
    "logprob_mode": "processed",
    "attempts": 2,
    "spans": [Span("generate", 0, 1.5, 0.25), Span("tool", 1, 2.0, 0.5, "error")],
    "extra": {"a field of tomorrow": [1]},
}


def a_full_sample(**changes: Any) -> Sample:
    """Return a sample none of whose fields has its default."""
    return a_sample(
        reward={"score": 0.5, "format": 1.0},
        stop_reason=StopReason.RESPONSE_LENGTH,
        versions=7,
        temperature=0.5,
        **(FULL | changes),
    )


def test_the_full_sample_leaves_no_field_at_its_default() -> None:
    full, default = a_full_sample().to_dict(), Sample().to_dict()
    same = [name for name in SAMPLE_FIELDS if repr(full[name]) == repr(default[name])]
    assert same == []


@pytest.mark.parametrize("is_list", [False, True])
def test_body_and_text_keep_every_field(is_list: bool) -> None:
    leaves = [a_full_sample(), a_full_sample(member=1, metadata={"leaf": 2}, response="")]
    trajectory = leaves if is_list else leaves[0]
    text = wire.encode_text(trajectory)
    back = wire.decode_body(wire.encode_body(trajectory), GROUP, text)
    assert isinstance(back, list) is is_list
    for one, other in zip(back if isinstance(back, list) else [back], leaves, strict=False):
        assert repr(one.to_dict()) == repr(other.to_dict())
        one.validate()


def test_body_of_a_default_sample_is_small_and_comes_back_as_defaults() -> None:
    data = wire.encode_body(Sample())
    assert len(data) < 64
    back = wire.decode_body(data, a_prompt(0))
    assert isinstance(back, Sample)
    assert back.status is Status.PENDING
    assert back.loss_mask is None


def test_a_list_of_one_stays_a_list_and_of_none_too() -> None:
    for leaves in ([a_sample(3)], []):
        back = wire.decode_body(wire.encode_body(leaves), GROUP)
        assert isinstance(back, list)
        assert len(back) == len(leaves)


def test_body_leaves_the_text_and_the_group_to_their_own_records() -> None:
    data = wire.encode_body(a_full_sample(response="a long text " * 50))
    assert b"a long text" not in data
    assert str(GROUP.prompt).encode() not in data
    back = wire.decode_body(data, GROUP)
    assert isinstance(back, Sample)
    assert (back.response, back.prompt, back.label) == ("", GROUP.prompt, GROUP.label)


def test_decoded_arrays_are_views_that_cannot_be_written() -> None:
    back = wire.decode_body(wire.encode_body(a_full_sample()), GROUP)
    assert isinstance(back, Sample)
    for name in ("tokens", "loss_mask", "rollout_log_probs", "rollout_routed_experts"):
        assert not getattr(back, name).flags.writeable


def test_decoded_samples_share_no_mutable_field() -> None:
    data = wire.encode_body([a_full_sample(), a_full_sample()])
    one, other = wire.decode_body(data, GROUP)  # type: ignore[misc]  # two leaves
    default = wire.decode_body(wire.encode_body(Sample()), GROUP)
    again = wire.decode_body(wire.encode_body(Sample()), GROUP)
    for name in ("metadata", "sampling", "calls", "spans", "spec_info", "extra", "weight_versions"):
        assert getattr(one, name) is not getattr(other, name)
        assert getattr(default, name) is not getattr(again, name)


def test_body_of_32k_tokens_is_within_three_percent_of_its_raw_arrays() -> None:
    num_tokens, prompt = 32_768, 1024
    length = num_tokens - prompt
    turns = [(range(j, j + 310), range(154)) for j in range(0, 310 * 68, 310)]
    sample = a_sample(3, prompt_ids=range(prompt), turns=[*turns, (range(192), ())])
    assert (len(sample.tokens), sample.response_length) == (num_tokens, length)
    raw = num_tokens * 4 + length * 1 + length * 4
    assert raw < len(wire.encode_body(sample)) <= 1.03 * raw


CALL_CASES: dict[str, list[dict[str, Any]]] = {
    "alike": [{}, {}],
    "one": [{}],
    "other engines": [{"engine": "a"}, {"engine": "b", "finish": "abort"}],
    "other seeds": [{"sampling": {"t": 1.0, "seed": j, "stop": [1]}} for j in range(3)],
    "other keys": [{"sampling": {"t": 1.0}}, {"sampling": {"t": 1.0, "top_p": 0.5}}],
    "no sampling": [{"sampling": {}}, {"sampling": {}}],
    "versions that change": [{"versions": [(1, 2, 3), (2, 3, 4)]}, {"versions": []}],
    "a version of a part": [{"versions": [(1, 2, 3)]}, {"versions": [(1, 4, 6)]}],
    "no tokens": [{"start": 2, "end": 2, "versions": [(3, 2, 2)]}, {}],
}


@pytest.mark.parametrize("case", CALL_CASES)
def test_calls_come_back_as_they_were(case: str) -> None:
    calls = [
        Call(**{"rid": f"{j:032x}", "engine": "e", "start": 2 * j, "end": 2 * j + 2,
                "finish": "stop", "versions": [(7, 2 * j, 2 * j + 2)],
                "sampling": {"t": 1.0}, **changes})
        for j, changes in enumerate(CALL_CASES[case])
    ]  # fmt: skip
    sample = a_sample(3, prompt_ids=(), turns=[(range(6), ())])
    sample.calls = calls
    back = wire.decode_body(wire.encode_body(sample), GROUP)
    assert isinstance(back, Sample)
    assert back.calls == calls
    assert all(type(span) is tuple for call in back.calls for span in call.versions)


@pytest.mark.parametrize(
    "change", [{"rid": ["a"] * 3}, {"rid": []}, {"sampling": {"t": [1, 2, 3]}}, {"finish": 5}]
)
def test_calls_whose_columns_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    record = msgpack.unpackb(wire.encode_body(a_sample(turns=[((4,), ()), ((5,), ())])))
    record["leaves"][0]["calls"][3].update(change)
    with pytest.raises(WireError, match="body of group 3"):
        wire.decode_body(msgpack.packb(record), GROUP)


def test_plain_python_lists_are_coerced_to_the_wire_type() -> None:
    sample = a_sample(3)
    plain = wire.encode_body(sample)
    for name in ("tokens", "loss_mask", "rollout_log_probs"):
        setattr(sample, name, getattr(sample, name).tolist())
    assert wire.encode_body(sample) == plain
    sample.rollout_routed_experts = [[1], [2], [3], [4]]  # type: ignore[assignment]  # the mistake
    back = wire.decode_body(wire.encode_body(sample), GROUP)
    assert isinstance(back, Sample)
    assert back.rollout_routed_experts is not None
    assert back.rollout_routed_experts.tolist() == [[1], [2], [3], [4]]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_replay_rows_travel_in_the_dtype_in_which_they_were_served(dtype: str) -> None:
    sample = a_sample(3)
    sample.rollout_routed_experts = np.arange(16, dtype=dtype).reshape(4, 2, 2)
    body = wire.encode_body(sample)
    back = wire.decode_body(body, GROUP)
    assert isinstance(back, Sample)
    assert back.rollout_routed_experts is not None
    assert back.rollout_routed_experts.dtype == dtype
    assert sample.rollout_routed_experts.tobytes() in body, "raw, and in no wider type"


@pytest.mark.parametrize("rows", [np.zeros((4, 2, 2), np.int64), [[2**40]] * 4, np.zeros((4, 1))])
def test_replay_rows_wider_than_any_server_sends_are_refused(rows: Any) -> None:
    sample = a_sample(3)
    sample.rollout_routed_experts = rows
    with pytest.raises(WireError, match="replay rows are what the engine served"):
        wire.encode_body(sample)


@pytest.mark.parametrize("value", [{1, 2}, object(), 2**80, lambda: None])
def test_a_value_without_a_wire_form_is_refused_by_name(value: Any) -> None:
    with pytest.raises(WireError, match="no wire form"):
        wire.encode_body(a_sample(metadata={"x": value}))


# --- headers -------------------------------------------------------------------------------------
def test_header_has_an_entry_per_leaf_and_what_filters_need() -> None:
    leaves = [
        a_sample(turns=[((4, 5), (6,)), ((7,), ())], versions=[3, 5], reward=0.5),
        a_sample(stop_reason=StopReason.TURN_LENGTH, remove_sample=True, versions=-1, reward=None),
    ]
    data = wire.encode_header(leaves, num_turns=2, done_unix_s=12.5, attempts=1)
    header = wire.decode_header(data)
    assert (header.is_list, header.num_turns, header.done_unix_s, header.attempts) == (
        True, 2, 12.5, 1
    )  # fmt: skip
    first, second = header.leaves
    assert first.status is Status.COMPLETED
    assert first.stop_reason is StopReason.STOP
    assert (first.reward, first.response_length, first.num_tokens) == (0.5, 4, 7)
    assert (first.num_sampled, first.num_trainable, first.versions) == (3, 3, (3, 5))
    assert (second.status, second.reward, second.num_trainable, second.removed) == (
        Status.TRUNCATED, None, 0, True
    )  # fmt: skip
    assert second.versions is None
    assert len(data) < 400


def test_header_of_a_scalar_is_one_leaf() -> None:
    header = wire.decode_header(wire.encode_header(a_sample(reward=-0.1234567891234567)))
    assert not header.is_list
    assert [leaf.reward for leaf in header.leaves] == [-0.1234567891234567]


# --- prompts -------------------------------------------------------------------------------------
def test_prompt_record_keeps_every_field_but_what_the_queue_knows() -> None:
    group = PromptGroup(
        group_index=3, n=4, prompt=[{"role": "user", "content": "hi"}], label={"x": 1},
        tools=[{"type": "function"}], metadata={"m": 1}, sampling={"temperature": 0.5},
        env="math", priority=2, timeout_s=1.5, enqueued_unix_s=9.0,
    )  # fmt: skip
    data = wire.encode_prompt(group)
    assert wire.decode_prompt(data, 3, 4) == group
    default = PromptGroup(0, 1, "")
    assert [
        f.name for f in fields(group) if getattr(group, f.name) == getattr(default, f.name)
    ] == []


def test_prompt_record_without_a_prompt_is_refused() -> None:
    with pytest.raises(WireError, match="group 3: the field 'prompt' is missing"):
        wire.decode_prompt(msgpack.packb({"v": 1}), 3, 4)


def test_rules_of_environments_come_back_and_none_are_none() -> None:
    rules = {
        "default": EnvRule(),
        "math": EnvRule("acc", needs_reward=False),
        "judged": EnvRule(group_reward=True, on_truncated="mask"),
    }
    assert wire.decode_envs(wire.encode_envs(rules)) == rules
    assert wire.decode_envs(None) == {}


def test_a_rule_of_an_older_producer_has_the_defaults_and_one_of_a_newer_is_read() -> None:
    old = {"v": 1, "envs": {"default": {"reward_key": "acc", "needs_reward": True}}}
    assert wire.decode_envs(msgpack.packb(old)) == {"default": EnvRule("acc")}
    newer = {"v": 1, "envs": {"default": {"needs_reward": False, "color": "red"}}}
    assert wire.decode_envs(msgpack.packb(newer)) == {"default": EnvRule(needs_reward=False)}


@pytest.mark.parametrize(
    "rule", [{"on_truncated": "shorten"}, {"on_truncated": 1}, {"needs_reward": 1},
             {"group_reward": "yes"}, {"reward_key": 5}, "keep"],
)  # fmt: skip
def test_a_rule_that_nobody_could_obey_is_refused(rule: Any) -> None:
    with pytest.raises(WireError, match="envs"):
        wire.decode_envs(msgpack.packb({"v": 1, "envs": {"default": rule}}))


@pytest.mark.parametrize("reward", [0.0, 1.5, {"acc": 1.0}, None])
def test_a_header_takes_a_groups_reward_where_it_has_none_and_keeps_all_else(reward: Any) -> None:
    leaves = [a_sample(3, 1, reward=None), a_sample(3, 1, reward=0.5)]
    raw = wire.encode_header(leaves, num_turns=2, done_unix_s=2.5, attempts=1)
    record = msgpack.unpackb(raw) | {"of a newer writer": 7}
    new = wire.rewarded_header(msgpack.packb(record), reward, "too slow")
    header = wire.decode_header(new)
    assert [leaf.reward for leaf in header.leaves] == [reward, 0.5]
    assert header.reward_error == "too slow"
    record["leaves"][0]["reward"] = reward
    assert msgpack.unpackb(new) == record | {"reward_error": "too slow"}
    assert "reward_error" not in msgpack.unpackb(wire.rewarded_header(raw, 1.0))


# --- what is not ours ----------------------------------------------------------------------------
DECODERS: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "prompt": (lambda data: wire.decode_prompt(data, 3, 4), wire.encode_prompt(GROUP)),
    "envs": (wire.decode_envs, wire.encode_envs({"default": EnvRule()})),
    "rewarded header": (
        lambda data: wire.rewarded_header(data, 1.0),
        wire.encode_header(a_full_sample()),
    ),
    "header": (wire.decode_header, wire.encode_header(a_full_sample())),
    "body": (lambda data: wire.decode_body(data, GROUP), wire.encode_body(a_full_sample())),
    "text": (wire.decode_text, wire.encode_text(a_full_sample())),
}
GARBAGE = {
    "nothing of ours": b"hello, world",
    "random bytes": bytes(np.random.default_rng(0).integers(0, 256, 500, dtype=np.uint8)),
    "a pickle": pickle.dumps({"v": 1, "leaves": []}),
    "a pickle, zlib": zlib.compress(pickle.dumps({"v": 1})),
    "a number": msgpack.packb(1),
    "a list": msgpack.packb([1, 2]),
    "no version": msgpack.packb({"leaves": []}),
    "a version that is text": msgpack.packb({"v": "1"}),
    "a deep nest": b"\x91" * 100_000,
    "a map that says it is huge": b"\xdf\xff\xff\xff\xff\xa1v\x01",
    "a list that says it is huge": b"\x82\xa1v\x01\xa6leaves\xdd\xff\xff\xff\xff",
    "bytes that say they are huge": b"\x81\xa1v\xc6\xff\xff\xff\xff",
    "bad UTF-8": b"\x82\xa1v\x01\xa1\xff\x01",
    "zlib of garbage": zlib.compress(b"\xc1" * 100),
}


@pytest.mark.parametrize("what", GARBAGE)
@pytest.mark.parametrize("record", DECODERS)
def test_garbage_is_refused(record: str, what: str) -> None:
    with pytest.raises(WireError):
        DECODERS[record][0](GARBAGE[what])


@pytest.mark.parametrize("record", DECODERS)
def test_a_truncated_record_is_refused_wherever_it_ends(record: str) -> None:
    decode, data = DECODERS[record]
    for end in range(1, len(data)):
        with pytest.raises(WireError):
            decode(data[:end])


@pytest.mark.parametrize("record", ["prompt", "envs", "header", "body"])
def test_a_newer_version_is_refused_and_says_so(record: str) -> None:
    decode, data = DECODERS[record]
    newer = msgpack.packb({**msgpack.unpackb(data), "v": wire.WIRE_VERSION + 1})
    with pytest.raises(WireError, match="version 2 is newer than 1; upgrade this side"):
        decode(newer)


@pytest.mark.parametrize("record", ["prompt", "envs", "header"])
def test_unknown_fields_of_the_same_version_are_ignored(record: str) -> None:
    decode, data = DECODERS[record]
    more = msgpack.packb({**msgpack.unpackb(data), "tomorrow": {"x": [1]}})
    assert decode(more) == decode(data)


def test_unknown_fields_of_a_body_survive_the_next_writer() -> None:
    record = msgpack.unpackb(wire.encode_body(a_full_sample()))
    record["leaves"][0]["tomorrow"] = {"x": [1]}
    back = wire.decode_body(msgpack.packb(record), GROUP)
    assert isinstance(back, Sample)
    assert back.extra == {"a field of tomorrow": [1], "tomorrow": {"x": [1]}}
    again = wire.decode_body(wire.encode_body(back), GROUP)
    assert isinstance(again, Sample)
    assert again.to_dict()["tomorrow"] == {"x": [1]}


def test_unknown_columns_of_small_records_are_ignored() -> None:
    record = msgpack.unpackb(wire.encode_body(a_full_sample()))
    leaf = record["leaves"][0]
    leaf["spec_info"].append(99)
    leaf["spans"][0].append("more")
    leaf["calls"].append("more")
    leaf["calls"][3]["tomorrow"] = [1]
    back = wire.decode_body(msgpack.packb(record), GROUP)
    assert isinstance(back, Sample)
    assert back.spec_info == SpecInfo(1, 2, 3, 4)
    assert back.calls == a_full_sample().calls


@pytest.mark.parametrize(
    "change",
    [
        {"leaves": 5},
        {"leaves": [5]},
        {"leaves": [{}]},
        {"leaves": None},
    ],
)
def test_a_header_of_the_wrong_shape_is_refused(change: dict[str, Any]) -> None:
    record = msgpack.unpackb(wire.encode_header(a_sample()))
    with pytest.raises(WireError, match="header"):
        wire.decode_header(msgpack.packb({**record, **change}))


@pytest.mark.parametrize(
    "change", [{"versions": []}, {"versions": 5}, {"status": "fine"}, {"stop_reason": "tired"}]
)
def test_a_leaf_of_the_wrong_shape_is_refused(change: dict[str, Any]) -> None:
    record = msgpack.unpackb(wire.encode_header(a_sample()))
    record["leaves"][0].update(change)
    with pytest.raises(WireError, match="header"):
        wire.decode_header(msgpack.packb(record))


def test_a_text_that_inflates_beyond_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_TEXT_BYTES", 1000)
    bomb = wire.encode_text(a_sample(response="a" * 100_000))
    assert len(bomb) < 1000
    with pytest.raises(WireError, match="larger than allowed"):
        wire.decode_text(bomb)
    assert wire.decode_text(wire.encode_text(a_sample(response="a" * 900))) == ["a" * 900]


def test_text_is_compressed_and_empty_where_there_is_none() -> None:
    assert wire.encode_text(a_sample(response="")) == b""
    assert wire.encode_text([a_sample(response=""), a_sample(response="")]) == b""
    leaves = [a_sample(response="one " * 1000), a_sample(response="")]
    text = wire.encode_text(leaves)
    assert len(text) < 100
    assert wire.decode_text(text) == ["one " * 1000, ""]


def test_text_of_another_number_of_leaves_is_refused() -> None:
    body = wire.encode_body(a_sample(3))
    with pytest.raises(WireError, match="text of 2 leaves for a body of 1"):
        wire.decode_body(body, GROUP, wire.encode_text([a_sample(response="a")] * 2))


def test_header_records_compare_by_value() -> None:
    one = wire.decode_header(wire.encode_header(a_sample()))
    assert isinstance(one, MemberHeader)
    assert one == wire.decode_header(wire.encode_header(a_sample()))
