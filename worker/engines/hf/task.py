"""One request on its way: what it asked for, what it has, and why it ended.

Owns the rules of ending. Never touches a tensor. Invariant: `ids` is the prompt and then every
sampled token, in order; `done` of them lie in the KV cache, and the next forward pass starts there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .params import Params

Finish = dict[str, Any]
Experts = npt.NDArray[np.int32]
"""[tokens, layers, top_k]"""


class Decoder(Protocol):
    """The tokenizer, as far as an engine needs it."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids."""
        ...


@dataclass(slots=True, eq=False)
class Task:
    """One request."""

    rid: str
    prompt: list[int]
    params: Params
    score_from: int | None = None
    """Position whose successor is the first prompt token to be scored; None scores none."""
    salt: str = ""
    """Of the prefix cache: KV is shared only under the same one."""
    wants_experts: bool = False
    on_end: Callable[[Task], None] = lambda task: None
    """Called once, on the engine's thread."""

    ids: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)
    """(weight version that ended, after how many sampled tokens)."""
    counts: Counter[int] = field(default_factory=Counter)
    scores: list[float] = field(default_factory=list)
    """Of prompt tokens score_from + 1, …"""
    experts: list[Experts] = field(default_factory=list)
    """Rows of consecutive positions from 0, of the forward pass that came first."""
    finish: Finish | None = None
    version: str = ""
    """Label of the weights when it ended."""
    error: str | None = None
    """The request failed: HTTP 500."""

    place: Any = None
    """Where its KV lies."""
    done: int = 0
    clean: bool = True
    """All of its KV was computed under the current weights."""
    num_cached: int = 0
    num_experts: int = 0
    """For how many positions the experts are known."""
    seed: int | None = None

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    @property
    def pending(self) -> int:
        """How many ids are to be fed in before the next token can be sampled."""
        return len(self.ids) - self.done

    @property
    def reach(self) -> int:
        """How many ids may lie in the KV before the next forward pass: what it must still say."""
        reach = len(self.ids) - 1
        if self.score_from is not None and len(self.scores) < self.num_to_score:
            reach = min(reach, self.score_from + len(self.scores))
        return reach

    @property
    def num_to_score(self) -> int:
        """How many prompt tokens get a log-prob."""
        return 0 if self.score_from is None else len(self.prompt) - self.score_from - 1

    @property
    def decodes(self) -> bool:
        """Whether the next step is one token, like everybody else's."""
        if self.pending != 1:
            return False
        return bool(self.output) or (self.score_from is None and self.params.max_new_tokens > 0)

    def note_experts(self, rows: Experts) -> None:
        """Keep the experts of positions `done`, … where they are not known yet.

        What was fed in again (new weights, a retraction) keeps its first choice: it is that of the
        tokens that were sampled behind it.
        """
        new = rows[self.num_experts - self.done :]
        if len(new):
            self.experts.append(new)
            self.num_experts += len(new)

    def rewind(self) -> None:
        """Forget the KV; every id is fed in again. What was sampled stays."""
        self.done, self.clean = 0, True
        if not self.output:
            self.scores.clear()

    def forbidden(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Return the ids that may not come yet."""
        if len(self.output) >= self.params.min_new_tokens:
            return frozenset()
        return eos_ids | self.params.stop_token_ids

    def take(
        self, token: int, log_prob: float, eos_ids: frozenset[int], text: Decoder | None
    ) -> None:
        """Append a sampled token and see whether it ends the request.

        As SGLang: a stop string comes before a stop token, both before the length; `ignore_eos`
        ignores `stop_token_ids` too; the token that ends stays in the output.
        """
        self.ids.append(token)
        self.output.append(token)
        self.log_probs.append(log_prob)
        if self.params.penalizes:
            self.counts[token] += 1
        matched = self._stop_string(text)
        if matched is not None:
            self.finish = {"type": "stop", "matched": matched}
        elif not self.params.ignore_eos and (
            token in eos_ids or token in self.params.stop_token_ids
        ):
            self.finish = {"type": "stop", "matched": token}
        elif len(self.output) >= self.params.max_new_tokens:
            self.finish_by_length()

    def finish_by_length(self) -> None:
        """End because no further token may come."""
        self.finish = {"type": "length", "length": len(self.output)}

    def finish_by_abort(self, message: str) -> None:
        """End because somebody asked for it; what was sampled is real."""
        self.finish = {"type": "abort", "message": message, "status_code": None, "err_type": None}

    def finish_by_nan(self) -> None:
        """End because the logits were NaN; no token comes of them."""
        self.finish = {"type": "stop", "matched": "NaN happened"}

    def _stop_string(self, text: Decoder | None) -> str | None:
        """Return the stop string that the newest token completed.

        A token has a byte at least, so a stop string lies within as many tokens as it has bytes;
        a few more, because the first may begin inside a character.
        """
        stops = self.params.stop
        if not stops or text is None:
            return None
        window = max(len(stop.encode()) for stop in stops) + 4
        tail = text.decode(self.output[-window:], skip_special_tokens=False)
        return next((stop for stop in stops if stop in tail), None)

    def text(self, decoder: Decoder | None) -> str:
        """Return the output as text, trimmed as asked for; the ids never are."""
        if decoder is None:
            return ""
        ids, params = self.output, self.params
        matched = None if self.finish is None else self.finish.get("matched")
        if isinstance(matched, int) and not params.no_stop_trim:
            ids = ids[:-1]
        text = decoder.decode(ids, skip_special_tokens=params.skip_special_tokens)
        if isinstance(matched, str) and matched in text:
            start = text.index(matched)
            return text[: start + len(matched) if params.no_stop_trim else start]
        return text
