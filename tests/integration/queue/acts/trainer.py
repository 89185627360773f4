"""The trainer's acts: hold, train, checkpoint, restart; with the package's own claim to the run."""

from __future__ import annotations

from rollstream.errors import DropReason
from rollstream.queue import calls
from rollstream.queue.reads import StreamEntry
from tests.integration.queue.invariants import Lineage
from tests.integration.queue.model import Checkpoint, Trainer, WalkState
from tests.integration.queue.oracle import Scene


class TrainerActs(WalkState):
    """One trainer, and older ones that do not know yet that they were replaced."""

    def settle(self) -> None:
        """The trainer compares Redis with what it knows, by its own rules."""
        before, rollbacks = self.theirs, self.trainer.rollbacks
        m = self.sight.m
        mine = (m["consumer"], m["rewind_id"]) == (self.trainer.consumer, self.trainer.rewind_id)
        self.may_go_back = self.may_go_back or not self.settled
        if not self.settled:
            # From here on the server counts what the trainer tells it.
            self.theirs = Lineage(
                trained=self.lineage.trained | (before.trained if mine else set()),
                dropped=self.lineage.dropped | (before.dropped if mine else set()),
                skipped=self.lineage.skipped | (before.skipped if mine else set()),
            )
        self.trainer.check()
        if not self.settled:
            assert self.trainer.rollbacks == rollbacks + 1, "a rollback was not noticed"
            self.theirs.dropped &= self.sight.terminal
            self.theirs.skipped &= self.sight.terminal
            self.lineage = self.theirs

    def read_ready(self) -> None:
        queue = self.bench.queue
        if self.chance(0.2):
            entries = queue.pending_ready(count=100)
        else:
            entries = queue.read_ready(count=self.rng.randint(1, 4), block_s=0)
        self.look()
        if not self.chance(0.1):
            self.hold(entries)

    def read_evaluations(self) -> None:
        """Take evaluations that ended; or die with them in hand, so that they are forgotten."""
        after = self.rng.choice(["0", "0", *self.sight.entries["eval"]])
        entries = self.bench.queue.read_eval(after, count=self.rng.randint(1, 3), block_s=0)
        gids = [entry.group_index for entry in entries]
        assert all(gid in self.sight.ge for gid in gids), "an entry of an evaluation that ended"
        if self.chance(0.5):
            self.hold(entries)
        elif gids and self.settled:
            answers = self.call(calls.deliver(self.trainer.consumer, gids))
            assert {*answers} <= {"ok", "gone"}, "an evaluation is never stale"

    def hold(self, entries: list[StreamEntry]) -> None:
        """Take groups in hand, by the trainer's rules: never again what it holds or has acked."""
        fresh: dict[str, StreamEntry] = {}
        for entry in entries:
            gid = entry.group_index
            if gid.isdecimal() and int(gid) in self.trainer.terminal:
                self.stats["acked again"] += 1
                self.tell_acked([gid])
            elif not gid.isdecimal() or int(gid) not in self.trainer.held:
                fresh[gid] = entry
        if fresh:
            self._fetch(list(fresh.values()))

    def _fetch(self, entries: list[StreamEntry]) -> None:
        scene = Scene(self.sight, self.bench.now_ms, self.memory_full)
        found = self.bench.queue.deliver_and_fetch(self.trainer.consumer, entries)
        call = calls.deliver(self.trainer.consumer, [entry.group_index for entry in entries])
        answers = ["taken"] if found.taken else found.answers
        self.judge(call, answers, scene, self.look())
        if found.taken:
            assert not self.settled
            self.settle()
            return
        for entry, answer, group in zip(entries, found.answers, found.groups, strict=True):
            self.stats[f"deliver {answer}"] += 1
            if answer != "ok":
                continue
            assert group is not None
            assert len(group.bodies) == entry.n
            ended = zip(group.bodies, group.errors, strict=True)
            assert all((body is None) == (error is not None) for body, error in ended)
            if entry.group_index.isdecimal():
                self.trainer.held.add(int(entry.group_index))
            else:
                self.stats[f"evaluation {self.tell_acked([entry.group_index])[0]}"] += 1
        if self.chance(0.3):
            self.call(call)

    def ack(self) -> None:
        ids = sorted(self.trainer.held)[: self.rng.randint(1, 3)]
        if ids:
            self.train(ids)

    def train(self, ids: list[int]) -> None:
        for gid in ids:
            assert gid not in self.lineage.trained, f"invariant 8: {gid} is trained twice"
            self.lineage.trained.add(gid)
            self.trainer.held.discard(gid)
        for answer in self.tell_acked([str(gid) for gid in ids]):
            self.stats[f"ack {answer}"] += 1
        self.trainer.ended(ids)
        assert set(ids) <= self.sight.terminal, "acked, but not terminal"

    def tell_acked(self, gids: list[str]) -> list[str]:
        """Ack, and where Redis does not know this trainer, settle first."""
        ids = {int(gid) for gid in gids if gid.isdecimal()}
        for _ in range(2):
            answers = self.call(calls.ack(self.trainer.consumer, gids))
            if answers != ["taken"]:
                self.theirs.trained |= ids
                return answers
            assert not self.settled, "taken, and nobody took over"
            self.settle()
        raise AssertionError("taken again after settling")

    def old_trainer_calls(self) -> None:
        """Invariant 15: whoever was taken over hears so, whatever it calls."""
        gid = str(next(iter(self.trainer.held), 0))
        for old in self.old_trainers[-2:]:
            if self.sight.m["consumer"] == old.consumer:
                continue  # the server rolled back to before its end
            assert self.call(calls.ack(old.consumer, [gid])) == ["taken"]
            assert self.call(calls.deliver(old.consumer, [gid])) == ["taken"]
            assert self.call(calls.retire(old.consumer, gid, DropReason.STALE)) == "taken"
            assert self.call(calls.rewind(old.consumer, "no", 0, b"")).taken
            connects = int(self.sight.m["connects"])
            number = self.rng.choice([min(old.number, connects), connects, connects - 1, 0])
            answer = self.call(calls.connect(old.consumer, number))
            assert answer.consumer == self.sight.m["consumer"] != old.consumer
            self.stats["zombie trainer"] += 1

    def retire(self) -> None:
        if self.trainer.held and self.settled and self.chance(0.3):
            gid = self.trainer.held.pop()
            call = calls.retire(self.trainer.consumer, str(gid), DropReason.STALE)
            self.stats[f"retire {self.call(call)}"] += 1

    def trainer_names_anything(self) -> None:
        """Deliver or retire by ids that nobody handed out; none or all of them may be ready."""
        if not self.settled:
            return
        not_ready = [gid for gid, g in self.sight.groups.items() if g.state in ("open", "full")]
        choice = sorted(not_ready if self.chance(0.5) else self.sight.live)
        gids = self.rng.sample(choice, min(2, len(choice)))
        if self.chance(0.5):
            for answer in self.call(calls.deliver(self.trainer.consumer, gids)):
                self.stats[f"named {answer}"] += 1
        elif gids:
            call = calls.retire(self.trainer.consumer, gids[0], DropReason.STALE)
            if self.call(call) in ("dropped", "requeued") and gids[0].isdecimal():
                self.trainer.held.discard(int(gids[0]))

    def checkpoint(self) -> None:
        """Save with no group in hand, by the package's own rule."""
        if self.trainer.held:
            return
        self.settle()
        terminal = self.trainer.snapshot()
        above = {i for i in range(terminal.frontier, self.num_ids + 1) if i in terminal}
        ended = set(range(terminal.frontier)) | above
        assert ended == self.sight.terminal, "a checkpoint is another than what Redis counts"
        self.checkpoints.append(Checkpoint(self.lineage.copy(), terminal, self.trainer.version))

    def trainer_restarts(self) -> None:
        """From a checkpoint, often not the newest, or from none: where the run stands."""
        if self.chance(0.1):
            self._new_trainer()
            self.trainer.claim(None, None)
            self.lineage = self.theirs
            self.stats["trainer restarts without a checkpoint"] += 1
            return
        recent = 4 if self.chance(0.5) else len(self.checkpoints)
        self.restart_from(self.rng.choice([self.checkpoints[0], *self.checkpoints[-recent:]]))

    def _new_trainer(self) -> None:
        self.old_trainers.append(self.trainer)
        self.trainer = Trainer(self.judged, self)
        self.may_go_back = True

    def restart_from(self, saved: Checkpoint) -> None:
        """Let a new trainer take the run over with a checkpoint."""
        self._new_trainer()
        self.stats["trainer restarts"] += 1
        self.lineage = self.theirs = saved.lineage.copy()
        seen = self.sight.gs
        self.trainer.claim(saved.terminal, saved.version)
        self.stats["withdrawn by a rewind"] += len(seen - self.sight.gs)
        frontier = saved.terminal.frontier
        assert (self.sight.frontier, self.sight.terminal) == (
            frontier, {i for i in range(self.num_ids + 1) if i in saved.terminal},
        ), "a rewind leads elsewhere than to the checkpoint"  # fmt: skip

    def new_version(self) -> None:
        self.trainer.version = max(self.trainer.version, int(self.sight.m["version"]))
        self.trainer.version += self.rng.choice([1, 1, 3])
        self.call(calls.set_version(self.trainer.version))
