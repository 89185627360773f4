"""The figures of a run, and what of them must hold.

Owns the one line of JSON. Never judges a sample. Invariant: a figure that must be 0 is the sum of
what its findings count, and a run in which too little happened is no proof.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.agents.findings import Finding, Wrong
from tests.e2e.agents.model import Session, read_session
from tests.e2e.agents.overhead import Overhead
from tests.e2e.agents.record import Attempt, HandedMember, Record
from tests.e2e.agents.scenes import Scene

UNREAD_SHARE, UNREAD_SPARE = 0.03, 2
"""How many replies of clients that left may count as given out: they left as the last byte came."""
FIRST = (Wrong.LOST, Wrong.TWICE, Wrong.TOKEN, Wrong.ACCOUNT)
BESIDE = (Wrong.RETRY, Wrong.POLICY, Wrong.DROP, Wrong.ODD)


@dataclass(slots=True)
class Row:
    """One scene."""

    scene: Scene
    wrong: Counter[Wrong] = field(default_factory=Counter)
    sessions: int = 0
    """Trajectories that were handed out."""
    samples: int = 0
    attempts: int = 0
    calls: int = 0
    """Requests that agents sent."""
    engine_calls: int = 0
    tokens: int = 0
    """That were held against what was sampled."""
    kills: int = 0
    seconds: float = 0.0
    dialects: Counter[str] = field(default_factory=Counter)
    """Requests by dialect; of SDKs apart."""
    steps: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)
    agent: Counter[str] = field(default_factory=Counter)
    """Sum of `metadata["agent"]` over all sessions."""
    faults: Counter[str] = field(default_factory=Counter)
    """How calls ended at the engines."""

    @classmethod
    def of(cls, record: Record, findings: Sequence[Finding], checked: int) -> Row:
        """Count a scene."""
        row = cls(record.scene, tokens=checked, kills=record.kills, seconds=record.seconds)
        for finding in findings:
            row.wrong[finding.kind] += finding.count
        for _, member in record.members():
            row.sessions += 1
            row._unread(record, member)
            row.samples += len(member.samples)
            row.happened["branched"] += len(member.samples) > 1
            row.agent.update(member.samples[0].metadata.get("agent", {}))
        for attempt in record.attempts.values():
            row._count(attempt, read_session(attempt))
        for call in record.engine_calls.values():
            row.engine_calls += bool(call.nonce)
            row.happened["stopped_calls"] += call.finish == "left" and _ended(record, call.nonce)
            row.faults[call.finish or "never"] += 1
        return row

    def _unread(self, record: Record, member: HandedMember) -> None:
        """Count replies that a session gave out and whose client left all the same."""
        attempt = record.attempts.get(str(member.samples[0].metadata.get("nonce")))
        counts = member.samples[0].metadata.get("agent", {})
        if attempt is not None and "committed" in counts:
            nodes = read_session(attempt).nodes
            self.happened["given_out_unread"] += counts["committed"] - len(nodes)
            self.happened["left_of_handed"] += sum(t.how == "left" for t in attempt.tries)

    def _count(self, attempt: Attempt, session: Session) -> None:
        self.attempts += 1
        self.calls += len(attempt.tries)
        self.steps.update(attempt.steps)
        self.happened["replayed"] += session.num_retries
        self.happened["joined"] += session.num_joined_maybe
        self.happened["stopped_agents"] += bool(attempt.stopped)
        self.happened["unfinished_agents"] += attempt.ended_s is None
        for one in attempt.tries:
            self.dialects[f"{attempt.dialect}{'-sdk' if attempt.sdk else ''}"] += 1
            streamed = bool(one.body.get("stream"))
            self.happened["streams"] += streamed
            self.happened["left_streams" if streamed else "left_waiting"] += one.how == "left"
            self.happened["lost_answers"] += one.how == "lost"
            self.happened["unsent"] += one.how == "unsent"
            if one.how in ("got", "lost") and one.status != 200:
                self.happened[f"http_{one.status}"] += 1

    def to_dict(self) -> dict[str, Any]:
        """Return the row for the JSON line."""
        return {
            "scene": self.scene.name,
            "policy": self.scene.policy,
            **{kind.value: self.wrong[kind] for kind in (*FIRST, *BESIDE)},
            "sessions": self.sessions,
            "samples": self.samples,
            "attempts": self.attempts,
            "calls": self.calls,
            "engine_calls": self.engine_calls,
            "tokens": self.tokens,
            "kills": self.kills,
            "dialects": dict(sorted(self.dialects.items())),
            "steps": dict(sorted(self.steps.items())),
            "happened": dict(sorted(self.happened.items())),
            "agent": dict(self.agent),
            "faults": dict(sorted(self.faults.items())),
            "seconds": round(self.seconds, 1),
        }


def _ended(record: Record, nonce: str) -> bool:
    """Return whether an agent ended by itself: no call of its went with its process."""
    attempt = record.attempts.get(nonce)
    return attempt is not None and attempt.ended_s is not None


@dataclass(slots=True)
class Report:
    """Every scene's row."""

    least_sessions: int
    rows: list[Row] = field(default_factory=list)
    overhead: Overhead | None = None
    measures: bool = True
    seconds: float = 0.0

    def wrong(self, kind: Wrong) -> int:
        """Return a figure that must be 0, over all scenes."""
        return sum(row.wrong[kind] for row in self.rows)

    def _sum(self, name: str) -> int:
        return sum(int(getattr(row, name)) for row in self.rows)

    def _counts(self, name: str) -> Counter[str]:
        return sum((getattr(row, name) for row in self.rows), Counter())

    @property
    def broken(self) -> list[str]:
        """What of the promise does not hold, in words."""
        found = [
            f"{kind.value} = {self.wrong(kind)}"
            for kind in (*FIRST, *BESIDE)
            if self.wrong(kind) != 0
        ]
        for row in self.rows:
            unread, left = row.happened["given_out_unread"], row.happened["left_of_handed"]
            if unread > UNREAD_SPARE + UNREAD_SHARE * left:
                text = f"{unread} replies count as given out, of {left} whose clients left"
                found.append(f"{row.scene.name}: {text}")
        return found

    @property
    def missing(self) -> list[str]:
        """What there was too little of for the run to mean something."""
        happened, steps = self._counts("happened"), self._counts("steps")
        agent, dialects = self._counts("agent"), self._counts("dialects")
        share = self.least_sessions
        least = {
            "sessions": (self._sum("sessions"), self.least_sessions),
            "killed workers": (self._sum("kills"), sum(row.scene.kills for row in self.rows)),
            "requests": (self._sum("calls"), 4 * share),
            "tokens": (self._sum("tokens"), 100 * share),
            "streams": (happened["streams"], share),
            "replies told again": (agent["replayed"], share // 20),
            "retries that joined": (agent["joined"], share // 40),
            "clients that left a stream": (happened["left_streams"], share // 20),
            "calls that were stopped for a client that left a stream": (
                happened["stopped_calls"],
                happened["left_streams"] // 12,
            ),
            "clients that left": (happened["left_waiting"], share // 20),
            "replies that were superseded": (agent["superseded"], share // 20),
            "sessions of several samples": (happened["branched"], share // 10),
            "requests refused": (agent["refused"], share // 200),
            "requests that broke": (agent["failed"], share // 200),
            "sub-agents": (steps["sub"] + steps["subs"], share // 10),
            "compactions": (steps["compact"], share // 20),
        }
        for dialect in ("chat", "anthropic", "responses"):
            for client in (dialect, f"{dialect}-sdk"):
                least[f"requests of {client}"] = (dialects[client], share // 20)
        found = [f"{what}: {have}, needed {need}" for what, (have, need) in least.items()
                 if have < need]  # fmt: skip
        if self.measures and self.overhead is None:
            found.append("the overhead was not measured")
        return found

    def to_json(self) -> str:
        """Return the line."""
        overhead = self.overhead
        return json.dumps(
            {
                "sessions": self._sum("sessions"),
                "calls": self._sum("calls"),
                **{kind.value: self.wrong(kind) for kind in FIRST},
                "overhead_ms_p50": None if overhead is None else overhead.headline[0],
                "overhead_ms_p95": None if overhead is None else overhead.headline[1],
                "overhead_at": None if overhead is None else overhead.at,
                **{kind.value: self.wrong(kind) for kind in BESIDE},
                "samples": self._sum("samples"),
                "attempts": self._sum("attempts"),
                "engine_calls": self._sum("engine_calls"),
                "tokens": self._sum("tokens"),
                "kills": self._sum("kills"),
                "agent": dict(self._counts("agent")),
                "dialects": dict(sorted(self._counts("dialects").items())),
                "steps": dict(sorted(self._counts("steps").items())),
                "happened": dict(sorted(self._counts("happened").items())),
                "overhead": None if overhead is None else overhead.to_dict(),
                "seconds": round(self.seconds, 1),
                "scenes": [row.to_dict() for row in self.rows],
            }
        )
