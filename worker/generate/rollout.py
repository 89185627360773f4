"""One linear trajectory while it grows: budgets, engine calls, and how it ends.

Owns what `single_turn` and `multi_turn` share, and how a trajectory that another attempt began goes
on at its token. Never runs a tool, never writes to the sample that it was given (it fills a copy).
Invariant: a request is sent only with room for at least one token, and every token that a reply
brought is kept, whatever ended it; a reply that was aborted before its first token, or a call that
was not made, leaves nothing.

Axes: L all tokens so far, C sampled tokens of one reply.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any, TypeVar

from rollstream.errors import STATUS_OF, EngineFault, Status, StopReason, Withheld
from rollstream.sample import UNKNOWN_VERSION, Message, Sample, TokenIds

from ..engines.faults import Detail
from ..offload import decode
from ..telemetry.spans import timed
from ..tito.trajectory import Trajectory
from ..types import Completion, Finish, GenerateInput, GenerateOutput
from .budget import Room, cut_by, effective, room_left

Kind = TypeVar("Kind")
_FRESH = (Status.PENDING, Status.ABORTED)


@dataclass(slots=True)
class Reply:
    """What one engine call brought."""

    completion: Completion | None
    """None where no request was sent, the engine refused it as too long, or nothing came of it."""
    ended: StopReason | None
    """Why the trajectory ends here; None where the turn is complete."""


class LinearRollout:
    """Grows one append-only trajectory by engine calls and observations.

    Raises:
        ValueError: the sample has ended already, or its prompt is empty.
    """

    def __init__(self, given: GenerateInput) -> None:
        pending = given.sample
        if pending.status not in _FRESH:
            raise ValueError(
                f"sample {pending.group_index}:{pending.member} is {pending.status} already; only "
                "a pending or an aborted one can be generated"
            )
        self.given = given
        self.sample: Sample = copy.copy(pending)
        self.sample.metadata = dict(pending.metadata)
        self.is_resumed = len(pending.tokens) > 0
        """Whether an earlier attempt left tokens that this one goes on from."""
        stop_ids = given.renderer.stop_token_ids
        self.trajectory = (
            Trajectory.from_sample(pending, stop_ids, given.prompt, given.replay)
            if self.is_resumed
            else Trajectory(given.prompt, stop_ids, given.replay)
        )
        calls = self.trajectory.calls
        if self.trajectory.num_tokens == 0:
            raise ValueError("the prompt is empty: it has no token to go on from")
        self._salt = _salt_of(calls[0].dispatched_version) if calls else None
        """The version at the first call: later calls find the cache of the earlier ones."""
        goes_on = bool(calls) and calls[-1].finish == Finish.ABORT
        goes_on = goes_on and calls[-1].end == self.trajectory.num_tokens
        self.holds_whole_reply = self.is_resumed and self._is_closed(
            self.trajectory.last_completion()
        )
        """Whether the earlier attempt was stopped behind a reply that had ended by itself: there
        is nothing to sample before what follows it."""
        self.turn = self.trajectory.num_turns - (goes_on and not self.holds_whole_reply)
        """The turn that the next call belongs to, from 0; a resumed one goes on."""
        asked = len(as_messages(pending.prompt))
        self.messages: list[Message] = self.noted("messages", list)[asked:]
        """The conversation behind the prompt, where `debug_messages` asks for it."""

    def room(self) -> Room:
        """Return what is left before the next call."""
        held = self.trajectory.num_tokens
        response = self.trajectory.response_length
        return room_left(
            self.given.limits,
            self.given.sampling,
            held=held,
            response=response,
            turn=len(self.trajectory.last_completion()),
        )

    async def call(self) -> Reply:
        """Make the next call, if there is room for it, and keep what it brought.

        Raises:
            EngineFault: no engine answered sensibly; the caller of the generate function records.
        """
        room = self.room()
        if room.tokens <= 0:
            return Reply(None, self._no_room(room.bound))
        given, turn = self.given, self.turn
        sampling = effective(given.sampling, room, given.turn_seed(turn))
        version = given.version()
        try:
            start_mono_s = time.monotonic()
            try:
                completion = await given.engine.generate(
                    self.trajectory.request(),
                    sampling,
                    routing_key=self.sample.routing_key or f"g{self.sample.group_index}",
                    version=version,
                    deadline_s=max(given.deadline - time.monotonic(), 0.001),
                    salt=self._salt,
                )
            except BaseException as error:
                given.spans.ended("generate", turn, start_mono_s, error)
                raise
            given.spans.ended("generate", turn, start_mono_s)
        except Withheld:
            return Reply(None, StopReason.ABORT_WEIGHTS)
        except EngineFault as fault:
            if fault.detail == Detail.CONTEXT_OVERFLOW:  # its context is smaller than ours says
                return Reply(None, self._no_room(StopReason.CONTEXT_LENGTH))
            raise
        if completion.finish is Finish.ABORT and len(completion.ids) == 0:
            # Aborted while it waited: as if the call had never been made.
            return Reply(None, StopReason.ABORT_WEIGHTS)
        # A call may wait for a pause to end, or be tried again: the version is that of its try.
        dispatched = completion.dispatched_version
        if dispatched == UNKNOWN_VERSION:
            dispatched = version
        self._salt = dispatched if self._salt is None else self._salt
        self.trajectory.add_completion(
            completion,
            dispatched_version=dispatched,
            sampling=sampling.to_dict(),
            current_version=given.version(),
        )
        ended = self._ended_by(completion, room)
        self.turn += 1
        return Reply(completion, ended)

    def take_up(self, reply: Reply) -> bool:
        """Go on with the turn of a call that was stopped; True where its reply is whole already.

        Args:
            reply: the newest, `abort_weights`.
        """
        if reply.completion is None:  # nothing came: its turn never began
            return False
        if self._is_closed(self.trajectory.last_completion()):
            return True
        self.turn -= 1
        return False

    def _no_room(self, bound: StopReason) -> StopReason:
        if self.trajectory.response_length == 0 and bound is StopReason.CONTEXT_LENGTH:
            return StopReason.PROMPT_TOO_LONG
        return bound

    def _ended_by(self, completion: Completion, room: Room) -> StopReason | None:
        if completion.finish is Finish.ABORT:
            # Whoever asked for it, the trainer's pause or the engine's own operator: the tokens
            # are sound, and more of them may follow.
            return StopReason.ABORT_WEIGHTS
        return cut_by(completion, room, self._closing)

    @property
    def _closing(self) -> tuple[int, ...]:
        """Ids that end a turn."""
        return (*self.given.renderer.stop_token_ids, *self.given.sampling.stop_token_ids)

    def _is_closed(self, ids: TokenIds) -> bool:
        return len(ids) > 0 and int(ids[-1]) in self._closing

    def noted(self, key: str, kind: type[Kind]) -> Kind:
        """Return a copy of what an earlier attempt of a resumed trajectory noted, else nothing."""
        value = self.sample.metadata.get(key) if self.is_resumed else None
        return kind(value) if isinstance(value, kind) else kind()  # type: ignore[call-arg]  # kinds with defaults

    def note(self, key: str, value: Any) -> None:
        """Put one fact about the rollout into the sample's metadata."""
        self.sample.metadata[key] = value

    async def finish(self, reason: StopReason) -> GenerateOutput:
        """Write the trajectory into the sample, with its ending, and hand it over."""
        given, trajectory = self.given, self.trajectory
        with timed(given.spans, "merge"):
            # What goes on elsewhere has its text made there, of all tokens.
            unread = given.parks and reason is StopReason.ABORT_WEIGHTS
            text = "" if unread else await decode(given.renderer, trajectory.response_ids())
            sample = trajectory.write_to(self.sample, response=text)
        sample.finish(reason, STATUS_OF[reason])
        if given.debug_messages:
            sample.metadata["messages"] = [*as_messages(sample.prompt), *self.messages]
        return GenerateOutput(sample)

    def keep_reply(self) -> None:
        """Add the assistant's turn, tool-call markup kept, to the messages for people."""
        if not self.given.debug_messages:
            return
        ids = self.trajectory.last_completion()
        if len(ids) and int(ids[-1]) in self.given.renderer.stop_token_ids:
            ids = ids[:-1]
        if self.messages and self.messages[-1]["role"] == "assistant":
            self.messages.pop()  # the same turn, as far as an earlier attempt had got
        self.messages.append({"role": "assistant", "content": self.given.renderer.decode(ids)})


def _salt_of(version: int) -> int | None:
    return None if version == UNKNOWN_VERSION else version


def as_messages(prompt: str | list[Message]) -> list[Message]:
    """Return a prompt as messages."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
