"""What every renderer over a vocabulary shares, whoever writes its template.

Owns the text methods of `worker.types.Renderer`, the tool specs as they were normalized, and what
may not be appended to a conversation. Never renders. Invariant: the specs of an environment are
normalized once, not once a turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from rollstream.errors import MergeFault
from rollstream.sample import Message, TokenIds

from .ids import as_ids
from .messages import normalize_tools
from .tokenizer import Tokenizer

MAX_HELD_TOOLS = 64
"""So many sets of tool specs are held; rows may choose among an environment's tools."""
Specs = TypeVar("Specs")


class VocabularyRenderer(Generic[Specs]):
    """The part of a renderer that is the vocabulary's.

    Attributes:
        tokenizer: the vocabulary.
    """

    def __init__(
        self, tokenizer: Tokenizer, make_specs: Callable[[list[dict[str, Any]]], Specs]
    ) -> None:
        """Begin with no specs.

        Args:
            tokenizer: the vocabulary.
            make_specs: what the template is given, out of the normalized specs.
        """
        self.tokenizer = tokenizer
        self._make_specs = make_specs
        self._held_specs: dict[tuple[int, ...], tuple[list[Message], Specs]] = {}

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that no text of anybody may give."""
        return self.tokenizer.control_ids

    @property
    def max_token_id(self) -> int:
        """The largest id of the vocabulary."""
        return self.tokenizer.max_token_id

    def encode(self, text: str) -> TokenIds:
        """Encode plain text; control strings in it do not become control ids."""
        return as_ids(self.tokenizer.encode_plain(text))

    def encode_raw(self, text: str) -> TokenIds:
        """Encode a prompt that is rendered already; control strings in it become their ids."""
        return as_ids(self.tokenizer.encode_raw(text))

    def decode(self, ids: TokenIds) -> str:
        """Decode with special tokens kept; partial UTF-8 becomes U+FFFD."""
        return self.tokenizer.decode(ids.tolist())

    def pieces(self, ids: TokenIds) -> list[str]:
        """Return what each id alone stands for; half a character is surrogates (PEP 383)."""
        return self.tokenizer.pieces(ids.tolist())

    def _specs_of(self, tools: Sequence[Message] | None) -> Specs | None:
        """Return what the template is given of `tools`, made once for the same spec objects.

        Raises:
            ValueError: an entry that is no function tool.
        """
        if not tools:
            return None
        key = tuple(map(id, tools))
        found = self._held_specs.get(key)
        if found is None:
            specs = self._make_specs(normalize_tools(tools, self.tokenizer) or [])
            if len(self._held_specs) >= MAX_HELD_TOOLS:
                self._held_specs.clear()
            # What was given is held as well: while it lives, nothing else has its ids.
            found = self._held_specs[key] = (list(tools), specs)
        return found[1]

    def _extension(
        self,
        new_messages: Sequence[Message],
        tools: Sequence[Message] | None,
        normalize: Callable[[Sequence[Message]], list[dict[str, Any]]],
    ) -> tuple[list[dict[str, Any]], Specs | None]:
        """Return messages and specs as a template takes them behind an assistant turn.

        Raises:
            MergeFault: `no_messages`, `assistant_message`, `bad_message`, `bad_tools`.
        """
        if not new_messages:
            raise MergeFault("no message to extend the conversation with", detail="no_messages")
        for place, message in enumerate(new_messages):
            if isinstance(message, dict) and message.get("role") == "assistant":
                raise MergeFault(
                    f"cannot extend: message {place} is an assistant message, which only the "
                    "engine may add",
                    detail="assistant_message",
                )
        try:
            messages = normalize(new_messages)
        except ValueError as error:
            raise MergeFault(f"cannot extend: {error}", detail="bad_message") from None
        try:
            return messages, self._specs_of(tools)
        except ValueError as error:
            raise MergeFault(f"cannot extend: {error}", detail="bad_tools") from None
