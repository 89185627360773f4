"""What `--break` damages: each is a mistake that real gateways make, and must make the proof fail.

Owns the damages and the figure that each must show in. Never used by a run that is to be believed.
Invariant: a damaged sample still holds the record's own invariant (`Sample.validate`), so only the
proof can see it.

All but `account` change what the trainer got, or what agents were told, before it is judged;
`account` changes the run in Redis.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from rollstream.sample import Call, Sample
from tests.e2e.agents.findings import Wrong
from tests.e2e.agents.judge import trains
from tests.e2e.agents.model import read_session
from tests.e2e.agents.record import Record
from tests.e2e.agents.scenes import VOCABULARY


@dataclass(frozen=True, slots=True)
class Break:
    """One damage."""

    shows_in: Wrong
    damage: Callable[[Record], None] | None = None
    """Of a record, in place."""
    of_trees: bool = False
    """It needs a list of samples."""


def samples_of(record: Record) -> Iterator[Sample]:
    """Yield every sample."""
    for _, member in record.members():
        yield from member.samples


def retokenize(record: Record) -> None:
    """Encode every reply's text again, as who keeps messages and no ids does."""
    for sample in samples_of(record):
        for place, call in enumerate(sample.calls):
            ids = sample.tokens[call.start : call.end]
            again = encode(decode(ids.tolist()))
            if list(again) != ids.tolist():
                _replace(sample, place, np.array(again, dtype=np.int32))
                break


def drop_turn(record: Record) -> None:
    """Lose the last reply of every sample of several."""
    for sample in samples_of(record):
        if len(sample.calls) > 1:
            _cut_behind(sample, len(sample.calls) - 1)


def drop_token(record: Record) -> None:
    """Lose the end of the last reply, which closes its turn."""
    for sample in samples_of(record):
        if sample.calls and sample.calls[-1].end - sample.calls[-1].start > 1:
            _shorten(sample, len(sample.tokens) - 1)
            sample.calls[-1].end -= 1
            sample.calls[-1].versions = [
                (v, a, min(b, len(sample.tokens))) for v, a, b in sample.calls[-1].versions
            ]


def train_twice(record: Record) -> None:
    """Train what leaves share in all of them."""
    for sample in samples_of(record):
        sample.loss_mask = sample.sampled_mask()


def train_nowhere(record: Record) -> None:
    """Leave the first reply of every sample out of the loss."""
    for sample in samples_of(record):
        for call in sample.calls[:1]:
            assert sample.loss_mask is not None
            first = sample.prompt_length
            sample.loss_mask[call.start - first : call.end - first] = 0


def drop_leaf(record: Record) -> None:
    """Lose one leaf of every list."""
    for _, member in record.members():
        if len(member.samples) > 1:
            del member.samples[-1]


def lose_retry(record: Record) -> None:
    """Answer an SDK's second try with another reply than its first."""
    for attempt in record.attempts.values():
        lost: set[str] = set()
        for one in attempt.tries:
            if one.how == "lost" and one.status == 200:
                lost |= {node.said.id for node in read_session(attempt).nodes if one in node.tries}
                continue
            for reply_id in lost:
                if one.how == "got" and one.retry > 0 and reply_id in one.raw:
                    one.raw = one.raw.replace(reply_id, reply_id[:-4] + "beef")


def other_words(record: Record) -> None:
    """Tell clients something else than what was sampled."""
    for attempt in record.attempts.values():
        for one in attempt.tries:
            if one.how == "got":
                one.raw = one.raw.replace("The answer", "An answer")


def half_log_probs(record: Record) -> None:
    """Let the log-probs pass through half precision."""
    for sample in samples_of(record):
        assert sample.rollout_log_probs is not None
        sample.rollout_log_probs = sample.rollout_log_probs.astype(np.float16).astype(np.float32)


def other_prompt(record: Record) -> None:
    """Render one token of what stands before the first reply in another way."""
    for sample in samples_of(record):
        sample.tokens = sample.tokens.copy()
        sample.tokens[sample.prompt_length // 2] += 1


def other_branch(record: Record) -> None:
    """Train every reply of an agent that was ever given out, whatever the policy says."""
    for _, member in record.members():
        attempt = record.attempts[str(member.samples[0].metadata["nonce"])]
        tries = [t for t in attempt.tries if t.how == "got" and t.status == 200]
        if len(tries) > 2:
            # As if the newest reply had never been asked for.
            nodes = read_session(attempt).nodes
            gone = {t.n for t in nodes[-1].tries}
            attempt.tries = [t for t in attempt.tries if t.n not in gone]


def hand_twice(record: Record) -> None:
    """Hand a group out again."""
    record.handed.append(record.handed[0])


def lose_group(record: Record) -> None:
    """Forget a group between its hand-out and its ack."""
    record.acked.pop()


def short_group(record: Record) -> None:
    """Hand a group out without a member."""
    group = record.handed[-1]
    group.missing.append(f"{group.members.pop().member}: a member failed")


def forget_dropped(record: Record) -> None:
    """Count a token fewer than was dropped."""
    for _, member in record.members():
        counts = member.samples[0].metadata["agent"]
        counts["dropped_tokens"] = max(0, counts["dropped_tokens"] - 1)


def late_call(record: Record) -> None:
    """Go on calling engines for agents that have ended."""
    for call in record.engine_calls.values():
        call.started_s += 100.0


BREAKS: dict[str, Break] = {
    "retokenize": Break(Wrong.TOKEN, retokenize),
    "drop-turn": Break(Wrong.LOST, drop_turn),
    "drop-token": Break(Wrong.TOKEN, drop_token),
    "train-twice": Break(Wrong.TWICE, train_twice, of_trees=True),
    "train-nowhere": Break(Wrong.LOST, train_nowhere),
    "drop-leaf": Break(Wrong.LOST, drop_leaf, of_trees=True),
    "lose-retry": Break(Wrong.RETRY, lose_retry),
    "other-words": Break(Wrong.TOKEN, other_words),
    "half-log-probs": Break(Wrong.TOKEN, half_log_probs),
    "other-prompt": Break(Wrong.TOKEN, other_prompt),
    "other-branch": Break(Wrong.POLICY, other_branch),
    "hand-twice": Break(Wrong.TWICE, hand_twice),
    "lose-group": Break(Wrong.LOST, lose_group),
    "short-group": Break(Wrong.DROP, short_group),
    "forget-dropped": Break(Wrong.ACCOUNT, forget_dropped),
    "late-call": Break(Wrong.ODD, late_call),
    "account": Break(Wrong.ACCOUNT),
}
NAMES = tuple(BREAKS)


# --- how -----------------------------------------------------------------------------------------
@lru_cache(maxsize=1)
def _tokenizer() -> object:
    import tokenizers

    return tokenizers.Tokenizer.from_file(str(VOCABULARY))


def encode(text: str) -> list[int]:
    """Return the ids of a text, control strings as their ids."""
    ids: list[int] = _tokenizer().encode(text, add_special_tokens=False).ids  # type: ignore[attr-defined]
    return ids


def decode(ids: Sequence[int]) -> str:
    """Return the text of ids, control tokens shown."""
    text: str = _tokenizer().decode(list(ids), skip_special_tokens=False)  # type: ignore[attr-defined]
    return text


def _shorten(sample: Sample, length: int) -> None:
    gone = len(sample.tokens) - length
    kept = sample.response_length - gone
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    sample.tokens, sample.response_length = sample.tokens[:length].copy(), kept
    sample.loss_mask = sample.loss_mask[:kept].copy()
    sample.rollout_log_probs = sample.rollout_log_probs[:kept].copy()


def _cut_behind(sample: Sample, num_calls: int) -> None:
    """Keep the first so many calls, and nothing behind them."""
    sample.calls = sample.calls[:num_calls]
    _shorten(sample, sample.calls[-1].end)
    sample.derive_weight_versions()


def _replace(sample: Sample, place: int, ids: np.ndarray) -> None:
    """Put other ids in place of one call's, and move everything behind them."""
    call, first = sample.calls[place], sample.prompt_length
    assert sample.loss_mask is not None
    assert sample.rollout_log_probs is not None
    start, end = call.start, call.end
    sample.tokens = np.concatenate([sample.tokens[:start], ids, sample.tokens[end:]])
    log_probs = np.full(len(ids), -0.5, dtype=np.float32)
    ones = np.full(len(ids), int(trains(sample, call)), dtype=np.uint8)
    mask, held = sample.loss_mask, sample.rollout_log_probs
    a, b = start - first, end - first
    sample.loss_mask = np.concatenate([mask[:a], ones, mask[b:]])
    sample.rollout_log_probs = np.concatenate([held[:a], log_probs, held[b:]])
    shift = len(ids) - (end - start)
    sample.response_length += shift

    def moved(at: int) -> int:
        return at + shift if at >= end else at

    def other(one: Call) -> Call:
        spans = [(v, moved(x), moved(y)) for v, x, y in one.versions]
        return replace(copy.copy(one), start=moved(one.start), end=moved(one.end), versions=spans)

    sample.calls = [other(one) for one in sample.calls]


__all__ = ["BREAKS", "NAMES", "Break"]
