"""The scripted policy: what the simulated engine says, as a pure function.

A STAND-IN FOR A MODEL, NOT A MODEL: it looks answers up in a table, and a hash says whether it is
right.

Owns `expected` and `expected_log_prob`, which the server and an auditor call alike. Never keeps
state, looks at a clock, or draws from a shared generator. Invariant: ids are a function of
(sampling_seed, the ids up to the last generation prompt), and a log-prob is one of the ids up to
it, the temperature and, with `--versioned-log-probs`, the label of the weights that sampled it;
whoever sampled them. What follows the generation prompt is the partial text of a call that was
cut, so a resumed call continues the same text; a fault changes only where a reply ends, how its
frame looks, or whether it arrives.

Axes: P prompt ids, C ids of one reply.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from rollstream.sample import LogProbs, TokenIds

from . import numbers
from .script import Draw, PolicyConfig, Situation, write_text
from .vocabulary import Vocabulary

NOTICE = "a scripted stand-in for a model, not a model"
DEFAULT_SEED = 42
"""Of a request without a seed, as SGLang's deterministic inference has it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy says to one request, before any fault."""

    ids: TokenIds
    """[C]"""
    log_probs: LogProbs
    """[C] of the same ids; negative, finite."""
    finish: str
    """`stop` or `length`."""
    matched: int | str | None = None
    """Stop id or stop string."""


def expected_log_prob(
    context_ids: Sequence[int] | TokenIds,
    token_id: int,
    *,
    temperature: float = 1.0,
    version: str | int | None = None,
) -> np.float32:
    """Return the log-prob of one token behind a context, as weights of this label give it.

    Bit-equal to what the server says. It depends on no seed. `version` None is a server without
    `--versioned-log-probs`. For many tokens use `expected_log_probs`: the context is hashed once.
    """
    ids = np.append(np.asarray(context_ids, dtype=np.int32), np.int32(token_id))
    found: np.float32 = expected_log_probs(
        ids, len(ids) - 1, temperature=temperature, version=version
    )[0]
    return found


def expected_log_probs(
    ids: Sequence[int] | TokenIds,
    start: int,
    *,
    temperature: float = 1.0,
    version: str | int | Sequence[str | int] | None = None,
) -> LogProbs:
    """Return the log-probs of the ids from `start` on.

    Args:
        ids: [L] context and tokens.
        start: first position that is wanted.
        temperature: that they were sampled at (what the server's `--logprobs-mode` makes of it).
        version: the label of the weights: one for all, one for each position, or None.

    Shape: [L - start] float32.
    """
    return numbers.log_probs(np.asarray(ids, dtype=np.int32), start, temperature, version)


def sampled_by(
    ids: Sequence[int] | TokenIds,
    start: int,
    log_probs: LogProbs,
    candidates: Sequence[str | int],
    *,
    temperature: float = 1.0,
) -> list[str | int | None]:
    """Return for each token from `start` on which weights sampled it, told by its log-prob alone.

    Whatever the reply's spans say. None where it is of none of the candidates; two labels give the
    same float32 about once in ten million.
    """
    found: list[str | int | None] = [None] * len(log_probs)
    for label in candidates:
        said = expected_log_probs(ids, start, temperature=temperature, version=label)
        for at in np.flatnonzero(said == np.asarray(log_probs, dtype=np.float32)).tolist():
            if found[at] is None:
                found[at] = label
    return found


class Policy:
    """The pure function, with what it is a function *under*: a vocabulary, answers, rates."""

    def __init__(
        self, tokenizer: Tokenizer, answers: Mapping[str, str], config: PolicyConfig | None = None
    ) -> None:
        self.config = config or PolicyConfig()
        self.vocabulary = Vocabulary(tokenizer)
        self._answers = answers

    @classmethod
    def load(
        cls, tokenizer_path: str, answers: Mapping[str, str], config: PolicyConfig | None = None
    ) -> Policy:
        """Read a `tokenizer.json`.

        Raises:
            ConfigError: it has not the chat format's control tokens.
        """
        return cls(Tokenizer.from_file(tokenizer_path), answers, config)

    def expected(
        self, prompt_ids: Sequence[int] | TokenIds, sampling: Mapping[str, Any]
    ) -> tuple[TokenIds, LogProbs]:
        """Return the ids and log-probs that a call without a fault gets.

        Args:
            prompt_ids: [P] everything that the engine was sent, as `Sample.tokens[:call.start]`.
            sampling: `Call.sampling`: `seed` (or SGLang's `sampling_seed`), `max_new_tokens`,
                `stop_token_ids`, `stop`, `temperature`; other parameters change nothing.

        Shape: [C] int32, [C] float32.
        """
        reply = self.reply(prompt_ids, sampling)
        return reply.ids, reply.log_probs

    def reply(self, prompt_ids: Sequence[int] | TokenIds, sampling: Mapping[str, Any]) -> Reply:
        """Return what `expected` does, with the reason why it ends."""
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        seed = sampling.get("seed", sampling.get("sampling_seed"))
        said, script = self._script(prompt, DEFAULT_SEED if seed is None else int(seed))
        ids, matched = self._cut_at_stops(script[said:], sampling)
        finish = "stop"
        limit = sampling.get("max_new_tokens")
        limit = 128 if limit is None else int(limit)
        if len(ids) > limit:
            ids, finish, matched = ids[:limit], "length", None
        temperature = sampling.get("temperature")
        log_probs = self.score(
            np.concatenate([prompt, ids]),
            len(prompt),
            1.0 if temperature is None else float(temperature),
        )
        return Reply(ids, log_probs, finish, matched)

    def score(
        self,
        ids: TokenIds,
        start: int,
        temperature: float = 1.0,
        version: str | int | Sequence[str | int] | None = None,
    ) -> LogProbs:
        """Return the log-probs of the ids from `start` on, whoever wrote them.

        Shape: [L - start] float32.
        """
        return numbers.log_probs(ids, start, temperature, version)

    def mismatch(
        self,
        prompt_ids: Sequence[int] | TokenIds,
        sampling: Mapping[str, Any],
        ids: TokenIds,
        log_probs: LogProbs,
        spans: Sequence[tuple[str | int, int, int]] | None = None,
    ) -> str | None:
        """Return how one delivered call differs from what the policy says, None if it does not.

        A fault may have cut it: what was delivered must be a prefix, id for id and bit for bit.

        Args:
            prompt_ids: as for `expected`.
            sampling: as for `expected`.
            ids: [C] of the call.
            log_probs: [C] of the call.
            spans: (label, start, end) of the call where the server has `--versioned-log-probs`.
        """
        want_ids, want_log_probs = self.expected(prompt_ids, sampling)
        num = len(ids)
        if spans is not None:
            labels = [label for label, start, end in spans for _ in range(start, end)]
            if len(labels) != num:
                return f"{num} ids, versions of {len(labels)}"
            temperature = sampling.get("temperature")
            want_log_probs = expected_log_probs(
                np.concatenate([np.asarray(prompt_ids, dtype=np.int32), want_ids[:num]]),
                len(prompt_ids),
                temperature=1.0 if temperature is None else float(temperature),
                version=labels,
            )
        if num > len(want_ids):
            return f"{num} ids, at most {len(want_ids)} were sampled"
        if len(log_probs) != num:
            return f"{num} ids, {len(log_probs)} log-probs"
        differs = np.flatnonzero(np.asarray(ids) != want_ids[:num])
        if len(differs):
            at = int(differs[0])
            return f"id {at} is {int(ids[at])}, {int(want_ids[at])} was sampled"
        differs = np.flatnonzero(np.asarray(log_probs, dtype=np.float32) != want_log_probs[:num])
        if len(differs):
            at = int(differs[0])
            return f"log-prob {at} is {log_probs[at]!r}, {want_log_probs[at]!r} was sampled"
        return None

    def _script(self, prompt: TokenIds, seed: int) -> tuple[int, TokenIds]:
        """Return (how many ids are said already, the whole reply).

        Ids behind the generation prompt that are no prefix of this script were not said by it (a
        prefilled answer, a prompt without any chat format): then the head is the whole prompt.
        """
        opener = self.vocabulary.opener_end(prompt)
        if opener is not None:
            script = self._write(prompt[:opener], seed)
            said = len(prompt) - opener
            if said <= len(script) and np.array_equal(prompt[opener:], script[:said]):
                return said, script
        return 0, self._write(prompt, seed)

    def _write(self, head: TokenIds, seed: int) -> TokenIds:
        digest = hashlib.blake2b(
            np.ascontiguousarray(head, dtype="<i4").tobytes(),
            digest_size=16,
            key=(seed & (2**64 - 1)).to_bytes(8, "little"),
        ).digest()
        text_key, split_key = (int.from_bytes(digest[i : i + 8], "little") for i in (0, 8))
        question, tools, results = self.vocabulary.read_prompt(head)
        situation = Situation(
            question=question,
            answer=self._answers.get(question),
            tools=tools.expression,
            shells=tools.command,
            pythons=tools.code,
            num_results=results,
        )
        text = write_text(situation, self.config, Draw(text_key))
        ids = self.vocabulary.encode_reply(text)
        return self._split(ids, split_key)

    def _split(self, ids: TokenIds, key: int) -> TokenIds:
        """Return the same text with some tokens spelt as two."""
        chosen = np.flatnonzero(
            numbers.unit(numbers.mix(key, np.arange(len(ids), dtype=np.uint64)))
            < self.config.split_rate
        )
        if not len(chosen):
            return ids
        parts: list[TokenIds] = []
        behind = 0
        for at in chosen.tolist():
            pair = self.vocabulary.two_for(int(ids[at]), key + at)
            if pair is not None:
                parts += [ids[behind:at], np.array(pair, dtype=np.int32)]
                behind = at + 1
        return np.concatenate([*parts, ids[behind:]])

    def _cut_at_stops(
        self, ids: TokenIds, sampling: Mapping[str, Any]
    ) -> tuple[TokenIds, int | str | None]:
        """Return the ids up to the first stop id or stop string, which is kept (no_stop_trim)."""
        matched: int | str | None = self.vocabulary.im_end
        stop_ids = sampling.get("stop_token_ids") or ()
        hits = np.flatnonzero(np.isin(ids, list(stop_ids))).tolist() if len(stop_ids) else []
        if hits:
            ids, matched = ids[: hits[0] + 1], int(ids[hits[0]])
        stops = sampling.get("stop") or ()
        for stop in [stops] if isinstance(stops, str) else stops:
            num = self.vocabulary.num_until(ids, stop)
            if num is not None:
                ids, matched = ids[:num], stop
        return ids, matched
