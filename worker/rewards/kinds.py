"""Which reward a sample gets: the names, and the order in which they are looked up.

Owns the closed list of built-in kinds and `kind_for`. Never imports anything that a row names: a
row picks among built-in rewards, functions come from the configuration alone. Invariant: the same
row under the same configuration gets the same kind.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from rollstream.errors import ConfigError
from rollstream.settings import RewardTable

from ..functions import is_path, unknown_name
from .details import Detail, no_verdict
from .hub import PURE

NONE = "none"
REMOTE = "remote"
GYM = "reasoning_gym"
RANDOM = "deterministic_random"
CODE = "code"
MATH_VERIFY = "math_verify"
JOB_OF: Mapping[str, str] = {
    MATH_VERIFY: MATH_VERIFY,
    "boxed_math_verify": MATH_VERIFY,
    CODE: CODE,
}
"""Kind that only runs isolated → its job in the verifier's table."""
BUILT_IN: tuple[str, ...] = tuple(sorted([*PURE, *JOB_OF, REMOTE, GYM, RANDOM, NONE]))
COLUMN = "rm_type"
"""Of a row's metadata: the built-in reward that it asks for."""


def kind_for(table: RewardTable, metadata: Mapping[str, Any], *, is_own: bool) -> str:
    """Return the kind of a sample's reward.

    The environment's own `reward.kind` comes first, then the row's `metadata.rm_type`, then the
    flat `[reward]`. A function and `none` in the latter are not overridden by rows either: both
    say that judging is somebody else's.

    Args:
        table: of the environment.
        metadata: of the sample.
        is_own: `kind` was set in the environment's own table.

    Raises:
        RewardFault: the row names what is not built in.
    """
    if is_own or not rows_choose(table, is_own=is_own):
        return table.kind
    named = metadata.get(COLUMN)
    if named is None or (isinstance(named, str) and not named.strip()):
        return table.kind
    if isinstance(named, str) and (kind := named.strip()) in BUILT_IN and kind != NONE:
        return kind
    raise no_verdict(Detail.UNKNOWN_KIND, _not_built_in(named))


def rows_choose(table: RewardTable, *, is_own: bool) -> bool:
    """Return whether a row's `rm_type` counts in this environment."""
    return not is_own and table.kind != NONE and not is_path(table.kind)


def _not_built_in(named: Any) -> str:
    known = [kind for kind in BUILT_IN if kind != NONE]
    near = difflib.get_close_matches(str(named)[:100], known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return (
        f"metadata.{COLUMN} is {str(named)[:100]!r}, which is no built-in reward{hint} Rows "
        f"can name {', '.join(known)}. A function is named in reward.kind of the configuration."
    )


def needs_isolation(table: RewardTable, *, is_own: bool = True) -> bool:
    """Return whether the scorer of this table may ask verifiers.

    Args:
        table: of the environment.
        is_own: False also counts what rows could name.
    """
    if always_isolated(table):
        return True
    return rows_choose(table, is_own=is_own) and bool(set(JOB_OF.values()) & set(table.isolated))


def always_isolated(table: RewardTable) -> bool:
    """Return whether it asks them whatever its rows say."""
    return table.kind in JOB_OF or table.kind in table.isolated or table.isolated_share > 0


def check_kinds(table: RewardTable) -> None:
    """Check the names in a table.

    Raises:
        ConfigError: an unknown one, or one that may not run where it would.
    """
    jobs = sorted(set(JOB_OF.values()))
    for name in table.isolated:
        if name not in jobs and not is_path(name):
            raise ConfigError(
                f"reward.isolated names {name!r}; what can run isolated is {', '.join(jobs)}, and "
                "functions of yours by their paths"
            )
    if not is_path(table.kind) and table.kind not in BUILT_IN:
        raise unknown_name(table.kind, "reward", list(BUILT_IN))
    job = JOB_OF.get(table.kind) or (MATH_VERIFY if table.isolated_share > 0 else None)
    if job is not None and job not in table.isolated:
        raise ConfigError(
            f"{job} can hang or crash and only runs isolated; add it to reward.isolated"
        )
