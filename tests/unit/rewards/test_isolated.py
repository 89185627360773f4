"""What isolated jobs are asked, and what their results and faults become."""

from __future__ import annotations

from typing import Any

import pytest

from rollstream.errors import RewardFault
from rollstream.sample import Sample
from rollstream.settings import RewardTable
from tests.builders import a_prompt
from worker.isolation import IsolatedFault
from worker.rewards import Scorer, build_scorer

from .test_scorer import replied, reward_of

STDIN = {"stdin": [{"input": "1", "output": "2"}]}
PASSED = {"passed": 1, "total": 1, "problems": [], "reward": 1.0}


class Verifiers:
    """Answers what a test says; a double of `Isolated`."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any], float]] = []

    async def call(self, job: str, payload: dict[str, Any], *, timeout_s: float) -> Any:
        self.asked.append((job, payload, timeout_s))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def scorer_of(renderer: Any, verifiers: Verifiers, kind: str, **table: Any) -> Scorer:
    table = {"retry_backoff_s": 0.001, "timeout_s": 10.0} | table
    isolated: Any = verifiers
    return build_scorer(
        RewardTable(kind=kind, **table), renderer=renderer, run_seed=0, isolated=isolated
    )


def program(renderer: Any, text: str = "```python\nprint(2)\n```", **fields: Any) -> Sample:
    return replied(renderer, text, **({"label": STDIN} | fields))


async def test_code_sends_the_program_and_the_tests_and_keeps_what_they_said(qwen3: Any) -> None:
    verifiers = Verifiers(PASSED)
    sample = program(qwen3)
    assert await reward_of(scorer_of(qwen3, verifiers, "code"), sample) == 1.0
    assert sample.metadata["code"] == {"passed": 1, "total": 1, "problems": []}
    [(job, payload, timeout_s)] = verifiers.asked
    assert (job, timeout_s) == ("code", 10.0)
    assert payload == {
        "program": "print(2)\n", "tests": STDIN, "timeout_s": 5.0, "stop_early": True,
        "partial": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "reward"),
    [(None, 0.5), ("passed", {"score": 0.5, "passed": 1, "total": 2}), ("accuracy", 0.5)],
)
async def test_code_is_a_dictionary_where_reward_key_picks_from_it(
    key: str | None, reward: Any, qwen3: Any
) -> None:
    verifiers = Verifiers(PASSED | {"total": 2, "reward": 0.5})
    sample = program(qwen3, metadata={"partial": True})
    assert await reward_of(scorer_of(qwen3, verifiers, "code", key=key), sample) == reward
    assert verifiers.asked[0][1]["partial"] is True


@pytest.mark.parametrize("text", ["```cpp\nx\n```", "<think>\n```python\nprint(2)\n```\n"])
async def test_code_without_a_program_is_wrong_and_runs_nothing(text: str, qwen3: Any) -> None:
    verifiers = Verifiers()
    sample = program(qwen3, text)
    assert await reward_of(scorer_of(qwen3, verifiers, "code"), sample) == 0.0
    assert (verifiers.asked, sample.metadata["code"]["problems"]) == ([], ["no program"])


async def test_code_without_tests_is_no_verdict_and_runs_nothing(qwen3: Any) -> None:
    verifiers = Verifiers()
    with pytest.raises(RewardFault, match="the row has no tests"):
        await reward_of(scorer_of(qwen3, verifiers, "code"), program(qwen3, label=None))
    assert verifiers.asked == []


@pytest.mark.parametrize("kind", ["code", "math_verify", "my.own:f"])
@pytest.mark.parametrize(
    ("fault", "detail", "num_asked"),
    [
        (IsolatedFault("gone", "lost"), "lost", 3),
        (IsolatedFault("gone", "crashed"), "crashed", 3),
        (IsolatedFault("gone", "unreachable"), "unreachable", 3),
        (IsolatedFault("killed", "timeout"), "timeout", 1),
        (IsolatedFault("broke", "raised"), "raised", 1),
        (IsolatedFault("1 GB", "too_large"), "too_large", 1),
        (ValueError("the payload of a job is 2000000 bytes"), "invalid", 1),
    ],
)
async def test_a_job_without_a_result_is_no_verdict_and_never_a_zero(
    kind: str, fault: Exception, detail: str, num_asked: int, qwen3: Any
) -> None:
    verifiers = Verifiers(fault, fault, fault, fault)
    label = STDIN if kind == "code" else "2"
    sample = program(qwen3, label=label)
    scorer = scorer_of(qwen3, verifiers, kind, isolated=("code", "math_verify", "my.own:f"))
    with pytest.raises(RewardFault) as caught:
        await reward_of(scorer, sample)
    assert (caught.value.detail, caught.value.retryable) == (detail, False)
    if kind == "code" and detail == "timeout":  # it ends itself where it is the program's doing
        num_asked = 3
    assert len(verifiers.asked) == num_asked
    assert sample.reward is None


@pytest.mark.parametrize("result", [None, "1", True, float("nan"), [], {"reward": "1"}])
@pytest.mark.parametrize("kind", ["code", "math_verify"])
async def test_a_result_that_is_no_reward_is_no_verdict(kind: str, result: Any, qwen3: Any) -> None:
    label = STDIN if kind == "code" else "2"
    with pytest.raises(RewardFault, match="gave no number") as caught:
        await reward_of(scorer_of(qwen3, Verifiers(result), kind), program(qwen3, label=label))
    assert caught.value.detail == "invalid"


@pytest.mark.parametrize(
    ("kind", "text", "answer"),
    [
        ("math_verify", r"<answer>1+x</answer> \boxed{2}", "1+x"),
        ("math_verify", r"so \boxed{2}", "2"),
        ("math_verify", "just 2", "just 2"),
        ("boxed_math_verify", r"<answer>1+x</answer> \boxed{2}", "2"),
        ("boxed_math_verify", "just 2", None),
        ("math_verify", "9" * 9000, None),
        ("boxed_math_verify", rf"\boxed{{{'9' * 9000}}}", None),
    ],
)
async def test_math_verify_is_asked_for_the_answer_alone(
    kind: str, text: str, answer: str | None, qwen3: Any
) -> None:
    verifiers = Verifiers(0.0)
    assert await reward_of(scorer_of(qwen3, verifiers, kind), replied(qwen3, text)) == 0.0
    payloads = [payload for _, payload, _ in verifiers.asked]
    assert payloads == ([] if answer is None else [{"answer": answer, "label": "8"}])


async def test_an_isolated_function_gets_plain_columns_and_is_not_imported_here(
    qwen3: Any,
) -> None:
    path = "no.such.module:score"
    verifiers = Verifiers({"accuracy": 1, "note": "fine"})
    scorer = scorer_of(qwen3, verifiers, path, isolated=(path,), key="accuracy")
    sample = replied(qwen3, "eight<|im_end|>", prompt="4 + 4?", metadata={"level": 2})
    assert await reward_of(scorer, sample) == {"accuracy": 1, "note": "fine"}
    assert verifiers.asked == [
        (path, {"prompt": "4 + 4?", "response": "eight", "label": "8", "metadata": {"level": 2}},
         10.0)
    ]  # fmt: skip
    assert sample.metadata["final_text"] == "eight"


async def test_the_isolated_share_counts_for_the_environments_kind_and_not_for_a_rows(
    qwen3: Any,
) -> None:
    verifiers: Any = Verifiers(1.0)
    scorer = build_scorer(
        RewardTable(isolated_share=1.0), renderer=qwen3, run_seed=0, isolated=verifiers,
        is_own=False,
    )  # fmt: skip
    await scorer.score(replied(qwen3, "8", metadata={"rm_type": "f1"}), a_prompt())
    assert verifiers.asked == []
    await scorer.score(replied(qwen3, "8"), a_prompt())
    assert [job for job, _, _ in verifiers.asked] == ["math_verify"]


@pytest.mark.parametrize("kind", ["math", "f1", "math_verify", "boxed_math_verify", "code"])
async def test_a_long_reply_is_judged_in_a_thread_and_the_loop_goes_on(
    kind: str, monkeypatch: pytest.MonkeyPatch, qwen3: Any
) -> None:
    moved: list[str] = []

    async def in_thread(function: Any, *args: Any) -> Any:
        moved.append(type(args[0]).__name__)
        return function(*args)

    monkeypatch.setattr("worker.rewards.case.in_thread", in_thread)
    label = STDIN if kind == "code" else "8"
    result = PASSED if kind == "code" else 1.0
    for text, expected in (("8" * 10, []), ("8 " * 40_000, ["Sample", "Reply"])):
        sample = replied(qwen3, text, label=label)
        await reward_of(scorer_of(qwen3, Verifiers(result), kind), sample)
        assert moved == expected  # its ids are read there, and its text is judged there
