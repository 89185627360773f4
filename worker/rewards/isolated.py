"""Rewards that run in the verifier: `math_verify`, `code`, and functions that are listed so.

Owns the payloads and what results and faults become. Never runs what a model wrote. Invariant: a
result that was not computed is a `RewardFault`; what the policy did wrong is a number.
"""

from __future__ import annotations

from typing import Any

from rollstream.errors import RewardFault

from ..isolation import Isolated, IsolatedFault
from ..isolation.maths import MAX_ANSWER_CHARS
from . import verdicts
from .answers import answer_of, boxed
from .case import Case, computed
from .code import payload_of
from .details import Detail, no_verdict
from .hub import Reply, opened_label
from .kinds import CODE, MATH_VERIFY

OWN_TIME = 0.5
"""Share of a verdict's time that the tests of a program have, in time that the program had: what
uses it up is a failed test. The other half is for a machine that is busy, before the kill that
ends as no verdict."""


class IsolatedRewards:
    """Asks the verifiers for verdicts.

    Args:
        isolated: of the process.
        timeout_s: `reward.timeout_s`.
        key: `reward.key`.
    """

    def __init__(self, isolated: Isolated, *, timeout_s: float, key: str | None) -> None:
        self._isolated, self._timeout_s, self._key = isolated, timeout_s, key

    async def math_verify(self, case: Case) -> float:
        """Return 1.0 where the answer is the label as mathematics, else 0.0."""
        return await self._compared(await computed(_answer_of, case.reply), case)

    async def boxed_math_verify(self, case: Case) -> float:
        r"""Return the same for the last `\boxed{}` alone; 0.0 without one."""
        box = await computed(_box_of, case.reply)
        label = opened_label(case.reply.label)
        return 0.0 if box is None or not label else await self._compared(box, case)

    async def _compared(self, answer: str, case: Case) -> float:
        label = opened_label(case.reply.label)
        if len(answer) > MAX_ANSWER_CHARS:
            return 0.0
        return self._number(MATH_VERIFY, await self._call(MATH_VERIFY, answer=answer, label=label))

    async def code(self, case: Case) -> Any:
        """Return the reward of the program in the reply; what the tests said is in metadata.code.

        A dictionary of `score`, `passed` and `total` where `reward.key` names one of them.
        """
        reply = case.reply
        limit_s = OWN_TIME * self._timeout_s
        payload = await computed(_payload_of, reply, limit_s)
        if payload is None:
            result: Any = {"reward": 0.0, "passed": 0, "total": 0, "problems": ["no program"]}
        else:
            result = await self._call(CODE, **payload)
        if not isinstance(result, dict):
            raise _invalid(CODE, result)
        score = self._number(CODE, result.get("reward"))
        counts = {name: result.get(name) for name in ("passed", "total")}
        case.sample.metadata[CODE] = {**counts, "problems": result.get("problems", [])}
        return verdicts.one_of({"score": score, **counts}, self._key, ("score",))

    async def function(self, path: str, case: Case) -> Any:
        """Return what a function of the user's returns, which the verifier imports.

        It is called with one dictionary: `prompt`, `response` (the final text), `label` and
        `metadata`.
        """
        sample, reply = case.sample, case.reply
        sample.metadata["final_text"] = reply.text
        given = {
            "prompt": sample.prompt,
            "response": reply.text,
            "label": sample.label,
            "metadata": dict(sample.metadata),
        }
        given["metadata"].pop("final_text")
        return await self._call(path, **given)

    async def _call(self, job: str, **payload: Any) -> Any:
        try:
            return await self._isolated.call(job, payload, timeout_s=self._timeout_s)
        except IsolatedFault as fault:
            # A program that takes too long is a failed test: a kill says that others took the CPU.
            was_busy = job == CODE and fault.detail == Detail.TIMEOUT
            raise RewardFault(
                fault.message, retryable=fault.retryable or was_busy, detail=fault.detail
            ) from fault
        except ValueError as error:
            raise no_verdict(Detail.INVALID, f"{job} was not asked: {error}") from None

    @staticmethod
    def _number(job: str, value: Any) -> float:
        if not verdicts.is_number(value):
            raise _invalid(job, value)
        return float(value)


def _answer_of(reply: Reply) -> str:
    return answer_of(reply.text)


def _box_of(reply: Reply) -> str | None:
    return boxed(reply.text)


def _payload_of(reply: Reply, limit_s: float) -> dict[str, Any] | None:
    return payload_of(reply.text, reply.label, reply.metadata, limit_s)


def _invalid(job: str, value: Any) -> RewardFault:
    return no_verdict(Detail.INVALID, f"{job} gave no number: {value!r:.80}")
