"""Text to ids and back, over a `tokenizer.json`, without transformers.

Owns the three ways to encode, which differ in one thing only: what a control string such as
`<|im_end|>` or `</tool_response>` becomes.

    encode        what the renderers call: the ordinary added tokens of a template's own text
                  (`<tool_call>`) become ids, the special ones (`<|im_end|>`) never do
    encode_plain  text that anybody may have written: nothing in it becomes a control id
    encode_raw    a whole prompt that somebody rendered already: every control string is its id

Never adds a token of its own (no BOS), never decodes for a re-encoding.
Invariant: ids decode to the same text whichever way they were made; special tokens are kept.

Long texts release the GIL, so that they can run in a thread beside the event loop.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from rollstream.errors import ConfigError

LONG_TEXT_CHARS = 8192
"""From here on encoding takes over 2 ms: run it in a thread."""
LONG_IDS = 4096
"""From here on decoding is worth a thread."""

_CUT = "\udfff"
"""Where `escape` cuts a control string. A lone surrogate has no UTF-8, so no text can hold it."""
_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A `tokenizers.Tokenizer` behind the few methods that the package `renderers` asks for."""

    def __init__(
        self, inner: tokenizers.Tokenizer, name: str, scaffold: Iterable[str] = ()
    ) -> None:
        # One text at a time: a pool of threads would only add hops, and as many threads as cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Special tokens in any text are encoded as the characters they are. The ids of control
        # tokens come from `convert_tokens_to_ids`, where only a template can ask for them.
        inner.encode_special_tokens = True
        self._inner = inner
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None
        added = inner.get_added_tokens_decoder()
        self._control_ids = {token.content: number for number, token in added.items()}
        self._controls = _any_of(self._control_ids)
        self._cuts = {t.content: self._cut_of(t.content) for t in added.values() if not t.special}
        self._ordinary = _any_of(self._cuts)
        # Template text that is encoded at every turn. It is our own, so control strings in it are
        # meant: `<|im_start|>assistant\n` is what the renderers search for in a prompt.
        self._memo = {text: tuple(self.encode_raw(text)) for text in scaffold}
        self.max_token_id = self._find_max_token_id()

    @classmethod
    def load(cls, path: str | Path, scaffold: Iterable[str] = ()) -> Tokenizer:
        """Load a `tokenizer.json`, or the one in a folder.

        Raises:
            ConfigError: there is no such file, or it is not a tokenizer.
        """
        file = Path(path)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"model.tokenizer: no file {str(file)!r}; give the path of the model's "
                "tokenizer.json or of the folder that has it"
            )
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # noqa: BLE001 - the library raises bare Exception
            raise ConfigError(f"model.tokenizer: {str(file)!r} is no tokenizer: {error}") from None
        return cls(inner, str(file), scaffold)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a template's text, with `escape`d parts in it staying plain.

        Args:
            text: what a renderer joined.
            add_special_tokens: for the renderers' protocol; must be False.
        """
        memo = self._memo.get(text)
        if memo is not None:
            return list(memo)
        if _CUT not in text:
            return self._encode(text)
        return [number for piece in text.split(_CUT) for number in self._encode(piece)]

    def encode_plain(self, text: str) -> list[int]:
        """Encode text in which no control string becomes a control id."""
        escaped = self.escape(text)
        if _CUT not in escaped:
            return self._encode(escaped)
        return [number for piece in escaped.split(_CUT) for number in self._encode(piece)]

    def encode_raw(self, text: str) -> list[int]:
        """Encode a rendered prompt: every control string in it becomes its id."""
        numbers: list[int] = []
        for place, piece in enumerate(self._controls.split(text)):
            if place % 2:
                numbers.append(self._control_ids[piece])
            else:
                numbers.extend(self._encode(piece))
        return numbers

    def escape(self, text: str) -> str:
        """Return `text` so marked that `encode` makes plain ids of all of it.

        The ordinary added tokens cannot be switched off, so each of them is cut where the
        pre-tokenizer cuts too: the ids are those of the same text without added tokens.
        """
        if not text.isascii():
            text = _SURROGATE.sub("\ufffd", text)
        if self._ordinary.search(text) is None:
            return text
        return self._ordinary.sub(lambda found: self._cuts[found[0]], text)

    def decode(
        self, ids: Sequence[int] | npt.NDArray[np.integer], skip_special_tokens: bool = False
    ) -> str:
        """Decode ids; bytes that are no UTF-8 yet become U+FFFD."""
        numbers = ids if isinstance(ids, list) else list(ids)
        if len(numbers) > LONG_IDS:
            return self._inner.decode_batch([numbers], skip_special_tokens=skip_special_tokens)[0]
        return self._inner.decode(numbers, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """Return the id of a token, None where the vocabulary lacks it."""
        if isinstance(tokens, str):
            return self._inner.token_to_id(tokens)
        return [self._inner.token_to_id(token) for token in tokens]

    def token_id(self, token: str) -> int | None:
        """Return the id of one token, None where the vocabulary lacks it."""
        return self._inner.token_to_id(token)

    def _encode(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            # The batch call keeps no offsets (a sixth faster) and releases the GIL.
            return self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:
            return self._encode(_SURROGATE.sub("\ufffd", text))

    def _cut_of(self, token: str) -> str:
        """Return `token` with the cut at a boundary that the pre-tokenizer has inside it."""
        splitter = self._inner.pre_tokenizer
        if splitter is not None:
            # Neighbours of every class, so that the boundary does not depend on them.
            contexts = [("a", "a"), (" ", " "), ("1", "."), ("\n", "\n"), (".", "'s")]
            common = set(range(1, len(token)))
            for before, after in contexts:
                pieces = splitter.pre_tokenize_str(before + token + after)
                common &= {start - len(before) for _, (start, _) in pieces}
            if common:
                place = min(common)
                return token[:place] + _CUT + token[place:]
        return token[:1] + _CUT + token[1:]

    def _find_max_token_id(self) -> int:
        size = self._inner.get_vocab_size()
        if self._inner.id_to_token(size - 1) is not None and self._inner.id_to_token(size) is None:
            return size - 1  # no holes, the usual case: 0.1 s faster than listing the vocabulary
        return max(self._inner.get_vocab().values())


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of one group that finds any of `tokens`, the longest first."""
    ordered = sorted(tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, ordered))})" if ordered else "((?!))")
