"""The vocabulary as the scripted policy needs it: where a prompt's parts are, and how to spell.

Owns every look-up that is worth keeping (all pure, all bounded). Never decides what is said.
Invariant: caches change the time that an answer takes, never the answer.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import numpy as np
from tokenizers import Tokenizer

from rollstream.errors import ConfigError
from rollstream.sample import TokenIds

V = TypeVar("V")
_CACHE_ENTRIES = 65_536


class Listed(NamedTuple):
    """The functions of a prompt that the policy knows how to call, by the parameter they take."""

    expression: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    code: tuple[str, ...] = ()


class Vocabulary:
    """A tokenizer with a ChatML format (Qwen3's control tokens)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.im_start = self._control("<|im_start|>")
        self.im_end = self._control("<|im_end|>")
        self._tool_response = self._control("<tool_response>")
        self._opener = self._encode("<|im_start|>assistant\n")
        self._no_thinking = self._encode("<think>\n\n</think>\n\n")
        self._roles = {role: self._encode(role)[0] for role in ("system", "user")}
        self._pieces: dict[str, int] = tokenizer.get_vocab(with_added_tokens=False)
        self._systems: OrderedDict[bytes, Listed] = OrderedDict()
        self._questions: OrderedDict[bytes, str] = OrderedDict()
        self._pairs: dict[int, tuple[tuple[int, int], ...]] = {}
        self.size = tokenizer.get_vocab_size(with_added_tokens=True)

    def _control(self, text: str) -> int:
        found = self._tokenizer.token_to_id(text)
        if found is None:
            raise ConfigError(
                f"--tokenizer: the vocabulary has no {text}; the policy speaks ChatML"
            )
        return int(found)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_reply(self, text: str) -> TokenIds:
        """Return the canonical ids of a reply's text, with the turn's end.

        Shape: [C] int32.
        """
        return np.array([*self._encode(text), self.im_end], dtype=np.int32)

    def decode(self, ids: TokenIds) -> str:
        """Return the text with control tokens shown."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    def opener_end(self, prompt: TokenIds) -> int | None:
        """Return the index behind the last generation prompt, None where there is none.

        An empty reasoning block right behind it belongs to it (thinking switched off).
        """
        opener, extra = self._opener, self._no_thinking
        starts: list[int] = np.flatnonzero(prompt == self.im_start).tolist()
        for start in reversed(starts):
            end = start + len(opener)
            if prompt[start:end].tolist() == opener:
                if prompt[end : end + len(extra)].tolist() == extra:
                    return end + len(extra)
                return end
        return None

    def read_prompt(self, head: TokenIds) -> tuple[str, Listed, int]:
        """Return (question, the tools that it can call, tool results since the question).

        A prompt without chat format is the question itself.
        """
        starts = np.flatnonzero(head == self.im_start).tolist()
        if not starts:
            return self._text(head), Listed(), 0
        ends = [*starts[1:], len(head)]
        tools = Listed()
        if head[starts[0] + 1 : starts[0] + 2].tolist() == [self._roles["system"]]:
            system = head[starts[0] : ends[0]]
            tools = _cached(self._systems, system.tobytes(), lambda: self._tools(system))
        for start, end in zip(reversed(starts), reversed(ends), strict=True):
            role = head[start + 1 : start + 2].tolist()
            if role == [self._roles["user"]] and self._tool_response not in head[start:end][:5]:
                question = head[start + 1 : end]
                results = int(np.count_nonzero(head[end:] == self._tool_response))
                return self._text(question), tools, results
        return "", tools, 0

    def _text(self, ids: TokenIds) -> str:
        def read() -> str:
            text = self.decode(ids).removeprefix("user\n")
            return text.partition("<|im_end|>")[0].strip()

        return _cached(self._questions, ids.tobytes(), read)

    def _tools(self, system: TokenIds) -> Listed:
        """Return the names of the listed functions that have one of the known parameters."""
        listed = self.decode(system).rpartition("<tools>\n")[2].partition("\n</tools>")[0]
        names: dict[str, list[str]] = {parameter: [] for parameter in Listed._fields}
        for line in listed.splitlines():
            try:
                function = json.loads(line)["function"]
                taken = function["parameters"]["properties"]
                for parameter in Listed._fields:
                    if parameter in taken:
                        names[parameter].append(str(function["name"]))
            except (ValueError, KeyError, TypeError):
                continue
        return Listed(*map(tuple, names.values()))

    def two_for(self, token: int, draw: int) -> tuple[int, int] | None:
        """Return two tokens that spell the same as this one, None where there are none."""
        pairs = self._pairs.get(token)
        if pairs is None:
            pairs = self._pairs[token] = self._find_pairs(token)
        return pairs[draw % len(pairs)] if pairs else None

    def _find_pairs(self, token: int) -> tuple[tuple[int, int], ...]:
        piece = self._tokenizer.id_to_token(token)
        if piece is None or self._pieces.get(piece) != token:
            return ()  # a control token stays whole
        halves = ((piece[:i], piece[i:]) for i in range(1, len(piece)))
        return tuple(
            (self._pieces[a], self._pieces[b])
            for a, b in halves
            if a in self._pieces and b in self._pieces
        )

    def num_until(self, ids: TokenIds, stop: str) -> int | None:
        """Return how many ids spell a text that contains `stop`, None if all of them do not."""
        if not stop or stop not in self.decode(ids):
            return None
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high) // 2
            if stop in self.decode(ids[:middle]):
                high = middle
            else:
                low = middle + 1
        return low


def _cached(cache: OrderedDict[bytes, V], key: bytes, make: Callable[[], V]) -> V:
    found = cache.get(key)
    if found is None:
        found = cache[key] = make()
        if len(cache) > _CACHE_ENTRIES:
            cache.popitem(last=False)
    return found
