"""What is to be done for one group index: enqueue its prompt, or skip it.

Owns the way from an index to a call: order, source, rows, the limit on tokens. Never talks to
Redis. Invariant: a pure function of the index (but for the time it carries), so repeating it after
a crash gives the same call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog

from rollstream.errors import ConfigError
from rollstream.group import PromptGroup
from rollstream.queue.calls import ScriptCall, enqueue, skip

from .order import GroupOrder
from .rows import RowRules, texts_of
from .sources import BadRow, Row, Rows

SHOWN_BAD_ROWS = 10
"""More are counted only."""
log = structlog.get_logger("producer")


class Supply:
    """Calls by group index."""

    def __init__(
        self,
        source: Rows,
        order: GroupOrder,
        rules: RowRules,
        *,
        checked: Sequence[range],
        skip_bad_rows: bool = False,
        token_limit: TokenLimit | None = None,
    ) -> None:
        """Begin.

        Args:
            source: the rows.
            order: which row a group index stands for.
            rules: what rows are read by.
            checked: rows that `check` reads, a range for each file or data set.
            skip_bad_rows: count them and go on.
            token_limit: longer prompts are skipped.
        """
        self.order = order
        self.skipped: Counter[str] = Counter()
        """Rows by why they are not enqueued: `bad_row`, `too_long`."""
        self._source, self._rules, self._checked = source, rules, checked
        self._skip_bad_rows, self._token_limit = skip_bad_rows, token_limit
        self._counted: set[int] = set()

    def check(self) -> None:
        """Read the rows that are cheap to read, before anything is enqueued.

        Raises:
            BadRow: the first bad one, with how many more there are; unless bad rows are skipped.
            ConfigError: every one of them is bad, or every one of one file or data set.
        """
        bad: list[BadRow] = []
        read: list[Row] = []
        for numbers in self._checked:
            bad_here = self._check(numbers, read)
            if bad_here and len(bad_here) == len(numbers):
                raise ConfigError(f"every row is bad; the first: {bad_here[0]}")
            bad += bad_here
        unused = self._rules.unused(read)
        if unused:
            log.info("columns_unused", columns=unused[:20])
        if bad and not self._skip_bad_rows:
            more = len(bad) - 1
            also = f" ({more} more bad rows; the next: {bad[1].where})" if more else ""
            raise BadRow(
                bad[0].where,
                f"{bad[0].reason}{also}. Nothing was enqueued: mend the rows, or set "
                "producer.on_bad_row = skip",
            )

    def _check(self, numbers: range, read: list[Row]) -> list[BadRow]:
        """Return the bad rows among `numbers`; add the first of the others to `read`."""
        bad: list[BadRow] = []
        for place, number in enumerate(numbers):
            try:
                row = self._source.row(number)
                if place < SHOWN_BAD_ROWS:
                    read.append(row)
                self._rules.group(row, number)
            except BadRow as error:
                bad.append(error)
        return bad

    def call(self, group_index: int) -> ScriptCall[str]:
        """Return the call for a group index; a repeat is counted once.

        Raises:
            BadRow: its row cannot be a group, and bad rows are not skipped.
        """
        number = self.order.row(group_index)
        try:
            row = self._source.row(number)
            group, record = self._rules.group(row, group_index)
        except BadRow as error:
            if not self._skip_bad_rows:
                raise
            self._count(group_index, "bad_row", error.where, error.reason)
            return skip(group_index)
        limit = self._token_limit
        if limit is not None and (tokens := limit.count(group)) > limit.most:
            self._count(group_index, "too_long", row.where, f"{tokens} tokens")
            return skip(group_index)
        return enqueue(
            group_index,
            group.n,
            record,
            priority=group.priority,
            timeout_ms=int(group.timeout_s * 1000),
            env=group.env,
        )

    def _count(self, group_index: int, kind: str, where: str, reason: str) -> None:
        if group_index in self._counted:
            return
        self._counted.add(group_index)
        self.skipped[kind] += 1
        if self.skipped[kind] <= SHOWN_BAD_ROWS:
            log.warning(
                "row_skipped", kind=kind, where=where, reason=reason, group_index=group_index
            )


class TokenLimit:
    """How many tokens the text of a prompt may have, by the model's tokenizer.

    The text of the messages is counted, not the chat format around it: a prompt over the limit is
    certainly too long, one just below it may still be.
    """

    def __init__(self, tokenizer: str, most: int) -> None:
        self.most = most
        self._tokenizer = load_tokenizer(tokenizer)

    def count(self, group: PromptGroup) -> int:
        """Return the tokens of a prompt's text."""
        texts = texts_of(group.prompt)
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return sum(len(encoding.ids) for encoding in encodings)


def load_tokenizer(tokenizer: str) -> Any:
    """Return the tokenizer of a `tokenizer.json`, or of the folder that holds one.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    from tokenizers import Tokenizer

    path = Path(tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not tokenizer or not path.is_file():
        raise ConfigError(
            f"model.tokenizer = {tokenizer!r}: producer.max_prompt_tokens needs a tokenizer.json, "
            "or the folder that holds one"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        raise ConfigError(f"model.tokenizer: {path} is no tokenizer: {error}") from None
