"""What a user's generate function may return, and what happens to everything else."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rollstream.errors import AgentFault, Status, StopReason
from rollstream.group import PromptGroup
from rollstream.sample import Sample
from rollstream.wire import decode_body, encode_body
from tests.builders import a_sample
from tests.generate_stage import InProcess, Says, check, given
from tests.unit.generate import weather
from tests.unit.generate.weather import says
from worker.generate import finish, multi_turn, single_turn
from worker.types import GenerateOutput


def pending() -> Sample:
    return Sample(
        group_index=7, member=2, index=28674, rollout_id=28674, prompt="a prompt", label="8",
        routing_key="run-7", generate_function_path="mine.py:generate",
        sampling={"temperature": 1.0}, attempts=1,
    )  # fmt: skip


def returned(**fields: Any) -> Sample:
    """Return a valid sample that says nothing about whose it is."""
    known: dict[str, Any] = {
        "group_index": None, "index": None, "rollout_id": None, "prompt": "", "sampling": {},
        "status": Status.PENDING, "stop_reason": None, "reward": None, "weight_versions": [],
    }  # fmt: skip
    return dataclasses.replace(a_sample(), **(known | fields))


def one(output: Any) -> Sample:
    result = finish(pending(), output, lambda ids: f"<{len(ids)}>")
    assert isinstance(result, Sample)
    return result


def test_a_scalar_is_filled_in_and_stays_a_scalar() -> None:
    sample = one(GenerateOutput(returned()))
    owner = (sample.group_index, sample.member, sample.index, sample.rollout_id)
    assert owner == (7, 2, 28674, 28674)
    assert (sample.prompt, sample.label, sample.routing_key) == ("a prompt", "8", "run-7")
    assert sample.generate_function_path == "mine.py:generate"
    assert sample.sampling == {"temperature": 1.0}
    assert sample.attempts == 1
    assert (sample.status, sample.stop_reason) == (Status.COMPLETED, StopReason.STOP)
    assert sample.weight_versions == [0]
    assert sample.response == "<2>"


def test_a_list_stays_a_list_and_its_leaves_share_the_rollout_id() -> None:
    leaves = [returned(), returned()]
    result = finish(pending(), GenerateOutput(leaves))
    assert result is leaves
    assert [(leaf.index, leaf.rollout_id, leaf.member) for leaf in leaves] == [
        (28674, 28674, 2)
    ] * 2


def test_a_list_of_one_stays_a_list() -> None:
    leaves = [returned()]
    assert finish(pending(), GenerateOutput(leaves)) is leaves


def test_plain_lists_become_the_arrays_of_the_record() -> None:
    sample = one(
        GenerateOutput(
            returned(tokens=[1, 2, 3, 4, 5], loss_mask=[True, False], rollout_log_probs=[-1, -0.5])
        )
    )
    assert sample.tokens.dtype == np.int32
    assert sample.loss_mask.dtype == np.uint8
    assert sample.rollout_log_probs.dtype == np.float32
    assert sample.loss_mask.tolist() == [1, 0]


def test_a_missing_mask_is_what_was_sampled() -> None:
    turns = (((4, 5), (6,)), ((7,), ()))
    base = a_sample(turns=turns)
    sample = one(GenerateOutput(returned(**_record(base), loss_mask=None)))
    assert sample.loss_mask.tolist() == [1, 1, 0, 1]


def _record(base: Sample) -> dict[str, Any]:
    names = ("tokens", "response_length", "rollout_log_probs", "calls")
    return {name: getattr(base, name) for name in names}


@pytest.mark.parametrize(
    ("finished", "reason"),
    [
        ("stop", StopReason.STOP),
        ("length", StopReason.TURN_LENGTH),
        ("abort", StopReason.ABORT_WEIGHTS),
    ],
)
def test_a_missing_ending_is_that_of_the_last_call(finished: str, reason: StopReason) -> None:
    sample = returned()
    sample.calls[-1].finish = finished
    assert one(GenerateOutput(sample)).stop_reason is reason


def test_without_any_call_the_ending_is_no_model_call() -> None:
    empty = Sample()
    sample = one(GenerateOutput(empty))
    assert (sample.status, sample.stop_reason) == (Status.ABORTED, StopReason.NO_MODEL_CALL)
    assert sample.loss_mask.tolist() == []


def test_a_status_alone_gets_its_reason() -> None:
    sample = one(GenerateOutput(returned(status=Status.TRUNCATED)))
    assert sample.stop_reason is StopReason.RESPONSE_LENGTH


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "returned NoneType; it must return GenerateOutput"),
        (Sample(), "returned Sample; it must return GenerateOutput"),
        (GenerateOutput([]), "an empty list"),
        (GenerateOutput([[Sample()]]), "returned list as sample 0"),  # type: ignore[list-item]  # the mistake
        (GenerateOutput(None), "returned NoneType as sample 0"),  # type: ignore[arg-type]  # the mistake
    ],
)
def test_an_output_of_another_shape_is_an_agent_fault(output: Any, message: str) -> None:
    with pytest.raises(AgentFault, match=message) as caught:
        finish(pending(), output)
    assert caught.value.detail == "invalid_output"
    assert not caught.value.retryable


def test_one_sample_twice_is_an_agent_fault() -> None:
    sample = returned()
    with pytest.raises(AgentFault, match="one sample twice"):
        finish(pending(), GenerateOutput([sample, sample]))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"group_index": 8}, "group_index is 8, but sample 7:2"),
        ({"index": 1}, "index is 1"),
        ({"rollout_id": 1}, "rollout_id is 1"),
        ({"loss_mask": [1]}, "loss_mask has 1 entries, response_length is 2"),
        ({"loss_mask": [1, 256]}, "loss_mask holds values that uint8 cannot"),
        ({"loss_mask": [-1, 1]}, "loss_mask holds values"),
        ({"tokens": [1.5, 2, 3, 4, 5]}, "tokens holds float64, expected integers"),
        ({"tokens": [[1, 2]]}, "tokens has shape"),
        ({"tokens": ["a"]}, "tokens holds"),
        ({"rollout_log_probs": [-1.0, float("nan")]}, "not finite"),
        ({"response_length": 9}, "response_length 9 does not fit 5 tokens"),
        (
            {"status": Status.COMPLETED, "stop_reason": StopReason.TURN_LENGTH},
            "status completed does not fit stop_reason turn_length",
        ),
        ({"stop_reason": "tired"}, "tired"),
        ({"metadata": {"x": object()}}, "metadata cannot be stored"),
        ({"metadata": {"x": 1 << 70}}, "metadata cannot be stored"),
        ({"metadata": {"x": "\ud800"}}, "metadata cannot be stored"),
        ({"metadata": None}, "metadata is NoneType"),
    ],
)
def test_a_record_that_breaks_the_contract_is_an_agent_fault(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(AgentFault, match=message) as caught:
        finish(pending(), GenerateOutput(returned(**fields)))
    assert caught.value.detail == "invalid_sample"


def test_the_wrong_leaf_is_named() -> None:
    with pytest.raises(AgentFault, match="leaf 1: ContractError"):
        finish(pending(), GenerateOutput([returned(), returned(loss_mask=[1])]))


@pytest.mark.parametrize("generate", [single_turn, multi_turn])
async def test_what_the_built_in_functions_return_passes_as_it_is(
    generate: Any, qwen3: Any
) -> None:
    stage = given(InProcess([Says([59, 92])]), qwen3)
    output = await generate(stage)
    before = output.samples.to_dict()
    assert finish(stage.sample, output) is output.samples
    assert str(output.samples.to_dict()) == str(before)


async def test_a_draft_and_its_revision_are_two_leaves_of_one_trajectory(qwen3: Any) -> None:
    from examples.generate_list import generate

    replies = [says(qwen3, text) for text in (weather.FINAL, weather.TURN_1, weather.FINAL)]
    engine = InProcess(replies)
    stage = given(engine, qwen3, weather.QUESTION, tools=weather.tools())
    draft, revision = finish(stage.sample, await generate(stage))  # type: ignore[misc]  # a list of two
    check(draft, engine.asked[:1], replies[:1])
    check(revision, engine.asked[1:], replies[1:])
    assert draft.rollout_id == revision.rollout_id == stage.sample.index
    assert len({asked.seed for asked in engine.asked}) == 3
    assert [leaf.metadata["part"] for leaf in (draft, revision)] == ["draft", "revision"]


@pytest.mark.parametrize(("group_index", "is_list"), [(0, True), (10, True), (3, False)])
async def test_one_demo_group_in_ten_returns_lists(
    group_index: int, is_list: bool, qwen3: Any
) -> None:
    from examples.demo_generate import generate

    engine = InProcess([says(qwen3, weather.FINAL)] * 2)
    stage = given(engine, qwen3, weather.QUESTION, group_index=group_index)
    result = finish(stage.sample, await generate(stage))
    assert isinstance(result, list) is is_list


# --- values that no length shows -----------------------------------------------------------------
A_CALL = returned().calls[0]
ROWS = np.zeros((4, 2, 1), np.int32)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokens": [1, 2, 3, 4, -5]}, "tokens holds -5, the vocabulary is 0..100"),
        ({"tokens": [-1, 2, 3, 4, 5]}, "tokens holds -1, "),
        ({"tokens": [1, 2, 3, 4, 101]}, "tokens holds 101, the vocabulary is 0..100"),
        ({"loss_mask": [2, 1]}, "loss_mask holds 2, expected 0 and 1"),
        ({"loss_mask": np.array([0, 255], np.uint8)}, "loss_mask holds 255, "),
        ({"rollout_log_probs": [-0.5, 0.01]}, "a log-prob is finite and <= 0"),
        ({"rollout_log_probs": [-0.5, -1e300]}, "finite"),
        ({"rollout_log_probs": [float("nan"), -0.5], "calls": []}, "finite"),
        ({"rollout_log_probs": [float("-inf"), -0.5], "calls": []}, "holds -inf"),
        ({"tokens": np.ones((5, 1), np.int32)}, r"tokens has shape \(5, 1\)"),
        ({"loss_mask": np.ones((2, 1), np.uint8)}, r"loss_mask has shape \(2, 1\)"),
        ({"response": b"bytes"}, "response is bytes, expected text"),
        ({"rollout_routed_experts": ROWS[:, 0]}, "expected whole numbers"),
        ({"rollout_routed_experts": ROWS.astype(np.float16)}, "expected whole numbers"),
        ({"rollout_indexer_topk": ROWS[:3]}, r"\[4, layers, top_k\]"),
        ({"rollout_indexer_topk": ROWS + np.int64(2**40)}, "int32"),
    ],
)
def test_values_that_would_reach_a_loss_as_they_are_are_refused(
    fields: dict[str, Any], says: str
) -> None:
    with pytest.raises(AgentFault, match=says):
        finish(pending(), GenerateOutput(returned(**fields)), max_token_id=100)


@pytest.mark.parametrize(
    "versions",
    [
        [("v3", 3, 5)], [(3, 0, 2)], [(3, 3, 4)], [(3, 4, 5)], [(3, 3, 4), (4, 3, 5)],
        [(3, 3.0, 5)], [(3, 3, 6)], [(3, 3, 6), (4, 6, 5)],
        [(1 << 63, 3, 5)], [(-2, 3, 5)],
    ],
)  # fmt: skip
def test_versions_that_do_not_cover_their_call_are_refused(versions: Any) -> None:
    call = dataclasses.replace(A_CALL, versions=versions)
    with pytest.raises(
        AgentFault,
        match=r"do not cover its tokens 3\.\.5|interpreted as an integer|has the version",
    ):
        one(GenerateOutput(returned(calls=[call])))


def test_a_call_without_versions_has_the_one_at_its_dispatch() -> None:
    call = dataclasses.replace(A_CALL, versions=[], dispatched_version=9)
    sample = one(GenerateOutput(returned(calls=[call])))
    assert sample.calls[0].versions == [(9, 3, 5)]
    assert sample.weight_versions == [9]


def test_numbers_of_numpy_become_plain_ones_that_the_wire_takes() -> None:
    call = dataclasses.replace(
        A_CALL, start=np.int64(3), end=np.int32(5), versions=[[np.int64(4), np.int64(3), 5]]
    )
    fields = {"calls": [call], "response_length": np.int64(2)}
    sample = one(GenerateOutput(returned(**fields, rollout_routed_experts=ROWS.astype(np.uint8))))
    back = decode_body(encode_body(sample), PromptGroup(7, 4, "a prompt"))
    assert isinstance(back, Sample)
    assert back.calls == [dataclasses.replace(A_CALL, versions=[(4, 3, 5)])]
    assert back.rollout_routed_experts is not None
    assert (back.response_length, back.rollout_routed_experts.dtype) == (2, np.uint8)


def test_arrays_of_a_returned_sample_are_its_own_and_what_was_sampled_is_read_only() -> None:
    memory = np.arange(10, dtype=np.int32)
    sample = one(GenerateOutput(returned(tokens=memory[1:6], loss_mask=[0, 1])))
    memory[:] = 0
    assert sample.tokens.tolist() == [1, 2, 3, 4, 5]
    for held in (sample.tokens, sample.rollout_log_probs):
        with pytest.raises(ValueError, match="read-only"):
            held[0] = 1
    sample.loss_mask[0] = 1  # a reward may narrow it
