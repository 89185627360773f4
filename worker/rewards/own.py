"""Functions that users name as their reward, called in this process.

Owns the call and what its endings become. Never runs one without a bound. Invariant: whatever the
function does (raises, hangs, exits, cancels), the caller has a reward or a `RewardFault` in time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from rollstream.errors import RewardFault
from rollstream.sample import Sample

from ..bounded import LeakedCancel, Overdue, run_bounded
from ..functions import describe, is_async
from .case import Case
from .details import Detail, no_verdict

T = TypeVar("T")


async def own_function(
    function: Callable[[Sample], Any], name: str, timeout_s: float, case: Case
) -> Any:
    """Call a user's function, which finds the final text in the metadata.

    Raises:
        RewardFault: no verdict. An exception may be a server's that passes; a thread that hangs
            is not given a second one.
    """
    case.sample.metadata["final_text"] = case.reply.text
    return await called(function, name, timeout_s, case.sample, may_pass=True)


async def called(
    function: Callable[[T], Any],
    name: str,
    timeout_s: float,
    judged: T,
    *,
    may_pass: bool,
) -> Any:
    """Call a function under the deadline of a verdict.

    Args:
        function: sync or async.
        name: for messages.
        timeout_s: of this call.
        judged: its argument, a sample or a group of them.
        may_pass: whether what it raises may be different the next time.

    Raises:
        RewardFault: no verdict.
    """
    try:
        return await run_bounded(function, judged, timeout_s=timeout_s)
    except RewardFault:
        raise
    except Overdue:
        raise no_verdict(
            Detail.TIMEOUT,
            f"the reward {name} did not return within {timeout_s:g} s (reward.timeout_s)",
            retryable=is_async(function),
        ) from None
    except LeakedCancel:
        raise no_verdict(
            Detail.CANCELLED, f"the reward {name} raised CancelledError", retryable=True
        ) from None
    except Exception as error:
        raise no_verdict(
            Detail.RAISED, f"the reward {name} raised {describe(error)}", retryable=may_pass
        ) from error
