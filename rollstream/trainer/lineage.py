"""A trainer's claim to a run: who it is, what it counts as ended, and whether Redis still agrees.

Owns the consumer token, the connect number, the rewind id, the terminal ids and the weight version
of one trainer process. Never reads groups. Invariants: `terminal` only grows while the process
lives; a server that knows less (it lost its last second, or everything) is told again; an older
trainer never takes a run back from a later one, whatever the server forgot of the two.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import TYPE_CHECKING, Any, NoReturn

from redis.exceptions import NoPermissionError

from rollstream.errors import ConsumerTaken, RunLost, RunMismatch, StreamError
from rollstream.frontier import TerminalIds
from rollstream.queue import calls
from rollstream.queue.answers import ControlAnswer

if TYPE_CHECKING:
    from rollstream.queue.blocking import BlockingQueue

log = logging.getLogger("rollstream.stream")

MAX_ABOVE = 8192
"""More own ids above the own frontier than this are folded into Redis's frontier."""
_CONNECT_TRIES = 20


class RunMissing(RunLost):
    """Redis has no such run at the moment; a producer may open it again."""


class Fenced(Exception):
    """Redis knows another consumer: taken over, or it lost its last second. Never leaves us."""


class Lineage:
    """The trainer's side of the frontier; calls may be repeated after `Fenced`.

    Attributes:
        consumer: token that every deliver, ack, retire and rewind carries.
        number: of this trainer's connect: higher than every earlier one that Redis remembers, and
            at least its time in milliseconds, so that it is also higher than those that Redis
            forgot. It never changes, so of two trainers the later one keeps the run.
        terminal: ids that are never handed out: of the checkpoint, acked here, and what Redis had
            ended when the two were last compared.
        version: the weight version that this process asserts.
        label: what the engines call it, where that was said.
        rollbacks: how often Redis was found to know less than this process.
        fingerprint: of the run's data; empty where it does not matter.
    """

    def __init__(self, queue: BlockingQueue) -> None:
        self._queue = queue
        self.consumer = secrets.token_hex(8)
        self.number = 0
        self.terminal = TerminalIds()
        self.version = 0
        self.label: str | None = None
        self.rollbacks = 0
        self.fingerprint = ""
        self._fold_above = MAX_ABOVE
        self._rewind_id = ""
        self._server_id = ""
        self._unsettled = False
        """Redis was found to know less and may not have heard everything yet."""
        self._taken = False
        """A later trainer was seen once: for good, even where Redis forgets it."""

    def claim(self, terminal: TerminalIds | None, version: int | None) -> ControlAnswer:
        """Become the run's consumer, and rewind the run to a checkpoint where there is one.

        Args:
            terminal: the checkpoint's ids; None goes on where the run stands.
            version: the checkpoint's weight version; the run's wins where it is higher.

        Raises:
            RunMissing: there is no such run.
            Fenced: Redis forgot the connect before it heard the rewind.
            ConsumerTaken: other trainers keep connecting.
        """
        self._server_id = self._read_server_id()
        answer = self._take_over()
        self._rewind_id = answer.rewind_id
        theirs = self._read_terminal()
        self.terminal = theirs if terminal is None else terminal.copy()
        # Numbers of a line that was abandoned are never used again: engines report them, samples
        # carry them. And engines below the run's version would get no calls.
        self.version = max(answer.version, version or 0)
        if self.terminal != theirs:
            self._rewind()
        self.attend()
        return self._assert_version()

    def attend(self, *, wait_s: float = 0.0, leaving: bool = False) -> None:
        """Say that this trainer is there, for those who watch the run; nothing depends on it.

        Args:
            wait_s: it waits for groups that are not there, and is believed for so long.
            leaving: it goes.
        """
        name, wait_ms = self._queue.connection_name, int(wait_s * 1000)
        self._queue.call(calls.attend(self.consumer, name, wait_ms=wait_ms, leaving=leaving))

    def check(self) -> ControlAnswer:
        """Compare Redis with what this process knows, and tell Redis again what it forgot.

        Raises:
            RunMissing: there is no such run.
            Fenced: Redis forgot this trainer once more meanwhile: check again.
            ConsumerTaken: a later trainer took the run over.
            RunMismatch: the run was begun anew with other data.
        """
        self.refuse_if_taken()
        server_id = self._read_server_id()
        self._refuse_other_data()
        answer = self._assert_version()
        self._refuse_others(answer)
        rolled_back = answer.connects < self.number or server_id != self._server_id
        if rolled_back or self._unsettled:
            self._unsettled = True
            answer = self._assert_again(answer, server_id)
            self._server_id, self._unsettled = server_id, False
        return answer

    def _assert_version(self) -> ControlAnswer:
        # Behind a later trainer, or where Redis forgot this one, it changes nothing.
        call = calls.set_version(self.version, self.label)
        return self._queue.call(calls.by(self.consumer, call))

    def refuse_if_taken(self) -> None:
        """Raise where a later trainer was seen before.

        Raises:
            ConsumerTaken: nothing may be done in this trainer's name any more.
        """
        if self._taken:
            self._give_up()

    def ended(self, group_indexes: list[int]) -> None:
        """Count groups as ended: acked here."""
        self.terminal.add(group_indexes)

    def snapshot(self) -> TerminalIds:
        """Return everything that this process or Redis counts as ended; one lineage, never two.

        Raises:
            RunMissing: there is no such run.
            ConsumerTaken: a later trainer took the run over.
        """
        for _ in range(_CONNECT_TRIES):
            self.check()
            rollbacks, theirs = self.rollbacks, self._read_terminal()
            self.check()
            if self.rollbacks == rollbacks:
                self.terminal.join(theirs)
                return self.terminal.copy()
        raise StreamError(f"run {self._queue.run!r}: Redis keeps losing what it was told")

    def fold(self) -> None:
        """Bound the memory of `terminal`: groups that filters dropped leave holes in it."""
        if self.terminal.num_above > self._fold_above:
            self.snapshot()
            # One old group can hold the frontier back: fold again once twice as much lies above.
            self._fold_above = max(MAX_ABOVE, 2 * self.terminal.num_above)

    def _assert_again(self, answer: ControlAnswer, server_id: str) -> ControlAnswer:
        """A rollback: token, version and terminal ids are Redis's to learn again."""
        self.rollbacks += 1
        # Where Redis forgot this very trainer, somebody older may have acked there meanwhile.
        is_ours = answer.consumer == self.consumer and answer.rewind_id == self._rewind_id
        answer = self._queue.call(calls.connect(self.consumer, self.number))
        self._refuse_others(answer)
        self._assert_version()
        theirs = self._read_terminal()
        log.warning(
            "redis lost what it knew: asserting again",
            extra={"run": self._queue.run, "frontier": theirs.frontier, "connect": self.number},
        )
        if is_ours and self._read_server_id() == server_id:
            self.terminal.join(theirs)
        if self.terminal != theirs:
            self._rewind()
        else:
            self._rewind_id = answer.rewind_id
        return answer

    def _take_over(self) -> ControlAnswer:
        """Connect as the latest trainer."""
        number = max(self.number, time.time_ns() // 1_000_000)
        for _ in range(_CONNECT_TRIES):
            answer = self._queue.call(calls.connect(self.consumer, number))
            if answer.state == "lost":
                raise RunMissing(f"Redis has no run {self._queue.run!r}")
            if answer.consumer == self.consumer:
                self.number = answer.connects
                return answer
            number = answer.connects + 1
        raise ConsumerTaken(f"other trainers keep connecting to run {self._queue.run!r}")

    def _refuse_other_data(self) -> None:
        """Nothing of this process may be told to a run that only has the name of its own."""
        key = f"{self._queue.prefix}m"
        found: Any = self._queue.client.hget(key, "fingerprint")
        if found is None or not self.fingerprint or found.decode() == self.fingerprint:
            return  # a run that is not there at all is told apart by the next call
        raise RunMismatch(
            f"run {self._queue.run!r} was begun anew with other data while this trainer was "
            "connected: ids mean other prompts now, so nothing more is acked; connect again, "
            "without a checkpoint of the old data"
        )

    def _refuse_others(self, answer: ControlAnswer) -> None:
        if answer.state == "lost":
            raise RunMissing(f"Redis has no run {self._queue.run!r}")
        if answer.connects > self.number or (
            answer.connects == self.number and answer.consumer != self.consumer
        ):
            self._give_up()

    def _give_up(self) -> NoReturn:
        self._taken = True
        raise ConsumerTaken(
            f"another trainer connected to run {self._queue.run!r} after this one: nothing more "
            "can be acked or saved here"
        )

    def _rewind(self) -> None:
        # Kept before it is known to have arrived: an answer that is lost must not look foreign.
        rewind_id = self._rewind_id = secrets.token_hex(8)
        terminal = self.terminal
        call = calls.rewind(self.consumer, rewind_id, terminal.frontier, terminal.bitmap())
        seen = beyond = 0
        while True:
            answer = self._queue.call(call)
            if answer.taken:
                raise Fenced  # another trainer, or a rollback behind the connect: `check` finds out
            seen, beyond = seen + answer.seen, beyond + answer.beyond
            if not answer.more:
                break
        log.info(
            "rewound",
            extra={"run": self._queue.run, "frontier": answer.frontier, "epoch": answer.epoch,
                   "seen": seen, "beyond": beyond},
        )  # fmt: skip

    def _read_terminal(self) -> TerminalIds:
        try:
            state = self._queue.call(calls.state())
        except RunLost as error:
            raise RunMissing(str(error)) from None
        return TerminalIds(state.frontier, state.bitmap)

    def _read_server_id(self) -> str:
        try:
            run_id = str(self._queue.client.info("server")["run_id"])
        except NoPermissionError:
            # INFO is @dangerous to some ACLs; the connect number still tells most rollbacks.
            run_id = ""
        # A failover there and back between two looks ends at the same server, which was not told
        # what the other one was.
        route = self._queue.route
        return run_id if route is None else f"{run_id}@{route.generation}"
