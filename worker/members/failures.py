"""Environments of which every group fails: told once, and the run ended where none other works.

Owns the counts of groups in a row without a success, one environment apart from the other. Never
ends the run itself: it says why it should end. Invariants: a success of an environment changes no
other's count; a run of which one environment works is never ended for another that does not.

Only refusals end a run (an engine says no to the request itself, so no other try can help). An
environment whose members fail in another way may be waiting for a server that comes back: it is
told, and its groups are dropped one by one with their own reason.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import structlog

PATIENCE = 10
"""So many times the groups may be refused before environments without any group yet count as none:
rows may name an environment late, or never."""

log = structlog.get_logger("worker")


@dataclass(slots=True)
class _Count:
    """Groups of one environment, in a row without a success."""

    failed: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    seen: bool = False
    told: bool = False


class Failures:
    """Counts of the groups that failed here, by environment.

    Args:
        envs: environments that get groups.
        most: so many refused groups in a row are all that is needed to know.
        all_come: each of `envs` gets groups for certain (it has a source of its own).
    """

    def __init__(self, envs: Collection[str], most: int, *, all_come: bool = False) -> None:
        self._most, self._all_come = most, all_come
        self._counts = {env: _Count() for env in envs}

    def answered(self, env: str) -> None:
        """Begin its count of refusals anew: an engine took a request of it."""
        if env in self._counts:
            self._counts[env].refused.clear()

    def worked(self, env: str) -> None:
        """Begin an environment's counts anew: a sample of it ended well."""
        count = self._counts.get(env)
        if count is None:
            return
        count.seen = True
        count.failed.clear()
        count.refused.clear()
        if count.told:
            count.told = False
            log.info("environment_works_again", env=env)

    def failed(self, env: str, key: str, message: str, *, refused: bool) -> str:
        """Count a group of which a member failed; return why the run should end, or nothing."""
        count = self._counts.get(env)
        if count is None:
            return ""
        count.seen = True
        if len(count.failed) < self._most:
            count.failed.add(key)
        if len(count.failed) >= self._most and not count.told:
            count.told = True
            log.error(
                "environment_only_fails",
                env=env,
                groups=len(count.failed),
                error=message,
                action="its groups are dropped with their reason, those of other environments go "
                "on; mend it, or take it out of the configuration",
            )
        if not refused:
            return ""
        if len(count.refused) < PATIENCE * self._most:
            count.refused.add(key)
        return self._why_to_end(message)

    def _why_to_end(self, message: str) -> str:
        others = [c for c in self._counts.values() if len(c.refused) < self._most]
        num = sum(len(count.refused) for count in self._counts.values())
        if others:
            unheard_of = not self._all_come and not any(count.seen for count in others)
            if not unheard_of or num < PATIENCE * self._most:
                return ""
        return f"{num} groups in a row were refused, the last one: {message}"
