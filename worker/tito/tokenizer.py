"""Text to ids and back, over a `tokenizer.json`, without transformers.

Owns one rule for *control strings*, the added tokens of a vocabulary (`<|im_end|>`, `<tool_call>`,
`</think>`), special or ordinary: in a template's own text each becomes its id; in what anybody
else wrote none does. Who renders calls `escape` on the second kind and `encode` on everything.

    escape        cuts every control string, so that `encode` reads it as the characters it is
    encode        template text with escaped parts in it: what is not cut becomes its id
    encode_plain  text that anybody may have written: `encode(escape(text))`
    encode_raw    a whole prompt that somebody rendered already: every control string is its id

Never adds a token of its own (no BOS), never decodes for a re-encoding.
Invariant: ids decode to the same text whichever way they were made; special tokens are kept.

Long texts release the GIL, so that they can run in a thread beside the event loop.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from rollstream.errors import ConfigError

from .patterns import any_of
from .pieces import Joins, PieceBytes, is_byte, joins_of

LONG_TEXT_CHARS = 8192
"""From here on encoding takes over 2 ms: run it in a thread."""
LONG_IDS = 4096
"""From here on decoding is worth a thread."""

CUT = "<|rollstream:cut|>"
"""Where `escape` cuts a control string; `encode` removes it.

Printable ASCII, so that it survives whatever a template does to a string (JSON with or without
`ensure_ascii`, `repr`, `strip`). No ending of it is a beginning of it, and `escape` cuts a literal
one like any control string: what is left whole was put there by `escape`.
"""
JOINT = "<|rollstream:joint|>"
"""The edges of a name that template text may complete to a control string (`</think` before a `>`).

`encode` cuts what goes across one, and removes it: `query` and `user` keep the ids that the
template's own rendering gives them. Of the same make as `CUT`.
"""
_SURROGATE = re.compile("[\ud800-\udfff]")
_NO_TOKENS: frozenset[str] = frozenset()
_NEIGHBOURS = [("a", "a"), (" ", " "), ("1", "."), ("\n", "\n"), (".", "'s")]
"""Of every class, so that a boundary inside a control string does not depend on them."""
_BRACKETS = "<>[]{}/|\uff5c"


class Tokenizer:
    """A `tokenizers.Tokenizer` behind the few methods that the package `renderers` asks for."""

    def __init__(
        self, inner: tokenizers.Tokenizer, name: str, scaffold: Iterable[str] = ()
    ) -> None:
        # One text at a time: a pool of threads would only add hops, and as many threads as cores.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        # Every added token in a text is its id, as in the model's own tokenizer. `escape` decides
        # which texts may hold one.
        inner.encode_special_tokens = False
        self._inner = inner
        self.name_or_path = name
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = None
        added = list(inner.get_added_tokens_decoder().values())
        self.controls = frozenset(t.content for t in added if _is_control(t.content))
        """Every control string of the vocabulary."""
        self.control_ids = frozenset(
            number
            for number, token in inner.get_added_tokens_decoder().items()
            if token.content in self.controls
        )
        marks = [*self.controls, CUT, JOINT]
        self._insides = frozenset(token.strip(_BRACKETS) for token in marks) | frozenset(
            token.strip(_BRACKETS.replace("/", "")) for token in marks
        )
        self._beginnings = frozenset(token[:k] for token in marks for k in range(1, len(token)))
        self._endings = frozenset(token[k:] for token in marks for k in range(1, len(token)))
        self._longest = max(map(len, marks))
        self._found = any_of(marks)
        self._places: dict[str, int] = {}
        # Only such tokens are looked for behind the normalizer: a Kelvin sign may become a K then.
        self._normalizer = inner.normalizer if any(t.normalized for t in added) else None
        # Template text that is encoded at every turn.
        self._memo = {text: tuple(self._encode(text)) for text in scaffold}
        self.max_token_id = self._find_max_token_id()
        self._piece_bytes: PieceBytes | None = None  # few ever ask
        self._joins: Joins | None = None

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
        if JOINT in text:
            text = self._settled(text)
        if CUT not in text:
            return self._encode(text)
        return self._encode_all([piece for piece in text.split(CUT) if piece])

    def encode_plain(self, text: str) -> list[int]:
        """Encode text in which no control string becomes a control id."""
        return self.encode(self.escape(text))

    def encode_raw(self, text: str) -> list[int]:
        """Encode a rendered prompt: every control string in it becomes its id."""
        return self._encode(text)

    def escape(self, text: str, keep: frozenset[str] = _NO_TOKENS) -> str:
        """Return `text` so marked that `encode` makes plain ids of all of it.

        Each control string is cut where the pre-tokenizer cuts too: the ids are those of the same
        text in a vocabulary without added tokens.

        Args:
            text: what somebody wrote.
            keep: control strings that are meant, and stay whole.
        """
        if not text.isascii():
            text = _SURROGATE.sub("\ufffd", text)
        if self._normalizer is not None:
            normal = self._normalizer.normalize_str(text)
            if self._found.search(normal) is not None:
                text = normal
        return text if self._found.search(text) is None else self._cut(text, keep)

    def escape_name(self, name: str) -> str:
        """Return a name so marked that no template makes a control string around it.

        Templates write `<{name}>` and `<function={name}>`: an argument that is called `think` or
        `</think` would open or close a reasoning block.
        """
        plain = _SURROGATE.sub("\ufffd", name)
        if self._normalizer is not None:
            plain = self._normalizer.normalize_str(plain)
        # In front only where it must be: templates sort keys.
        lengths = range(1, min(len(plain), self._longest) + 1)
        before = any(plain[:k] in self._endings for k in lengths)
        behind = plain in self._insides or any(plain[-k:] in self._beginnings for k in lengths)
        if not before and not behind:
            return self.escape(name)
        return JOINT * before + self.escape(plain) + JOINT * behind

    def unescape(self, text: str) -> str:
        """Return what `escape` and `escape_name` were given."""
        return text.replace(CUT, "").replace(JOINT, "")

    def decode(
        self, ids: Sequence[int] | npt.NDArray[np.integer], skip_special_tokens: bool = False
    ) -> str:
        """Decode ids; bytes that are no UTF-8 yet become U+FFFD."""
        numbers = ids if isinstance(ids, list) else list(ids)
        if len(numbers) > LONG_IDS:
            return self._inner.decode_batch([numbers], skip_special_tokens=skip_special_tokens)[0]
        return self._inner.decode(numbers, skip_special_tokens=skip_special_tokens)

    @property
    def joins(self) -> Joins:
        """How texts of ids become one, as far as it is known."""
        if self._joins is None:
            self._joins = joins_of(self._inner)
        return self._joins

    def in_run(self, number: int) -> bool:
        """Return whether a run of bytes goes on with an id: a byte, or one that stands for nothing.

        Of vocabularies that fall back to bytes.
        """
        token = self._inner.id_to_token(number)
        return token is None or is_byte(token)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Return what each id alone stands for.

        A byte that is no whole character is a surrogate (PEP 383):
        `piece.encode("utf-8", "surrogateescape")` is the bytes, and those of all ids, joined, are
        the text.
        """
        if self._piece_bytes is None:
            self._piece_bytes = PieceBytes(self._inner)
        return [self._piece_bytes.of(number).decode("utf-8", "surrogateescape") for number in ids]

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> int | list[int | None] | None:
        """Return the id of a token, None where the vocabulary lacks it."""
        if isinstance(tokens, str):
            return self._inner.token_to_id(tokens)
        return [self._inner.token_to_id(token) for token in tokens]

    def token_id(self, token: str) -> int | None:
        """Return the id of one token, None where the vocabulary lacks it."""
        return self._inner.token_to_id(token)

    def framing(self) -> list[int]:
        """Return the ids that the vocabulary's post-processor writes in front of a text: a BOS."""
        framed = self._inner.encode("a", add_special_tokens=True).ids
        bare = self._inner.encode("a", add_special_tokens=False).ids
        starts = range(len(framed) - len(bare) + 1)
        start = next((i for i in starts if framed[i : i + len(bare)] == bare), 0)
        return framed[:start]

    def _encode(self, text: str) -> list[int]:
        return self._encode_all([text]) if text else []

    def _encode_all(self, pieces: list[str]) -> list[int]:
        try:
            # The batch call keeps no offsets (a sixth faster) and releases the GIL.
            found = self._inner.encode_batch_fast(pieces, add_special_tokens=False)
        except TypeError:  # a lone surrogate has no UTF-8
            pieces = [_SURROGATE.sub("\ufffd", piece) for piece in pieces]
            found = self._inner.encode_batch_fast(pieces, add_special_tokens=False)
        if len(found) == 1:
            return found[0].ids
        return list(chain.from_iterable(encoding.ids for encoding in found))

    def _settled(self, text: str) -> str:
        """Return `text` without joints, and with every control string cut that went across one."""
        pieces = text.split(JOINT)
        joints = list(accumulate(map(len, pieces[:-1])))
        text = "".join(pieces)
        cuts, at = [0], 0
        while (found := self._found.search(text, at)) is not None:
            at = found.end()
            place = bisect_right(joints, found.start())
            if place < len(joints) and joints[place] < at:
                at = found.start() + self._place_of(found[0])
                cuts.append(at)
        return CUT.join(text[i:j] for i, j in pairwise([*cuts, len(text)]))

    def _cut(self, text: str, keep: frozenset[str]) -> str:
        pieces: list[str] = []
        start = place = 0
        while (found := self._found.search(text, place)) is not None:
            token = found[0]
            if token in keep:
                place = found.end()
                continue
            cut = self._place_of(token)
            # A control string may begin inside another one, or be the beginning of a longer one.
            pieces.append(text[start : found.start()] + self._cut(token[:cut], keep))
            start = place = found.start() + cut
        pieces.append(text[start:])
        return CUT.join(pieces)

    def _place_of(self, token: str) -> int:
        """Return a boundary that the pre-tokenizer has inside `token`, whatever is beside it."""
        place = self._places.get(token)
        if place is None:
            common = set(range(1, len(token)))
            splitter = self._inner.pre_tokenizer
            if splitter is not None:
                for before, after in _NEIGHBOURS:
                    pieces = splitter.pre_tokenize_str(before + token + after)
                    common &= {start - len(before) for _, (start, _) in pieces}
            place = self._places[token] = min(common, default=1)
        return place

    def _find_max_token_id(self) -> int:
        size = self._inner.get_vocab_size()
        if self._inner.id_to_token(size - 1) is not None and self._inner.id_to_token(size) is None:
            return size - 1  # no holes, the usual case: 0.1 s faster than listing the vocabulary
        return max(self._inner.get_vocab().values())


def _is_control(token: str) -> bool:
    """Return whether an added token is a marker: runs of spaces, or one character, are text."""
    return len(token) > 1 and not token.isspace()
