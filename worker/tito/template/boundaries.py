"""Where one turn ends and the next begins: the one table, and what follows from a row of it.

Owns the declared rules per chat format, the choice of one by what a vocabulary and a template hold,
and the arithmetic on ids at a boundary. Never renders, never encodes text that a user wrote.
Invariant: what was sampled is never changed; a boundary only says what to put behind it.

A template that no row describes gets a rule that was *derived* from what it renders
(`template_probe`), or is refused. A declared rule is held against the same probes, so a row can be
wrong for a template only with an error at start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rollstream.errors import ConfigError, MergeFault
from rollstream.sample import Message

from ..history import first_difference

ROLES = ("tool", "user", "system")
"""Roles that may follow an assistant turn, where nothing else is declared."""
DERIVED = "derived"
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class BoundaryRule:
    """How one chat format ends a turn, in its own tokens."""

    closes: tuple[str, ...]
    """What closes an assistant turn. The first is what the template writes; the model may sample
    any. Empty where the next turn's own role token does it."""
    behind: str
    """What the template writes between the close and the next turn."""
    assistant: str
    """What opens an assistant turn."""
    openers: tuple[str, ...]
    """The tokens that open a turn."""
    stops: tuple[str, ...] = ()
    """Further tokens that end a turn when they are sampled."""
    trim: tuple[str, ...] = ()
    """What may be missing at the end of a turn without being a difference."""
    roles: tuple[str, ...] = ROLES
    """Roles that may be appended."""


BOUNDARIES: dict[str, BoundaryRule] = {
    # Qwen, and many others.
    "chatml": BoundaryRule(
        closes=("<|im_end|>",),
        behind="\n",
        assistant="<|im_start|>assistant\n",
        openers=("<|im_start|>",),
        stops=("<|endoftext|>",),
        trim=("\n",),
    ),
    "llama-3": BoundaryRule(
        closes=("<|eot_id|>", "<|eom_id|>"),  # eom: after a call, where the model waits for it
        behind="",
        assistant="<|start_header_id|>assistant<|end_header_id|>\n\n",
        openers=("<|start_header_id|>",),
        stops=("<|end_of_text|>",),
    ),
    # The next role token closes: the model samples `<|user|>` or `<|observation|>` itself.
    "glm": BoundaryRule(
        closes=(),
        behind="",
        assistant="<|assistant|>",
        openers=("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
        trim=("<|user|>", "<|observation|>"),
    ),
    "deepseek": BoundaryRule(
        closes=("<｜end▁of▁sentence｜>",),
        behind="",
        assistant="<｜Assistant｜>",
        openers=("<｜User｜>", "<｜Assistant｜>"),
    ),
    "gemma": BoundaryRule(
        closes=("<end_of_turn>",),
        behind="\n",
        assistant="<start_of_turn>model\n",
        openers=("<start_of_turn>",),
        stops=("<eos>",),
        trim=("\n",),
    ),
    # A user's turn ends with [/INST], behind which the model writes; `</s>` closes its turn.
    "mistral": BoundaryRule(
        closes=("</s>",),
        behind="",
        assistant="[/INST]",
        openers=("[INST]",),
    ),
}


class Vocabulary(Protocol):
    """What a rule is looked up in: a `Tokenizer`."""

    def token_id(self, token: str) -> int | None:
        """Return the id of one token, None where the vocabulary lacks it."""
        ...

    def encode(self, text: str) -> list[int]:
        """Encode template text."""
        ...


@dataclass(frozen=True, slots=True)
class Boundary:
    """A rule over one vocabulary."""

    name: str
    close_ids: tuple[int, ...]
    """First the one to insert; empty where the next role token closes."""
    behind: tuple[int, ...]
    """Ids that the template writes behind the close."""
    assistant: str
    """Text of the header of an assistant turn; empty where it is not known."""
    opener_ids: frozenset[int]
    stop_ids: tuple[int, ...]
    """Every id that ends a turn when it is sampled."""
    trim_ids: frozenset[int]
    roles: tuple[str, ...]

    @property
    def end_ids(self) -> frozenset[int]:
        """Every id behind which nothing belongs to the turn any more."""
        return frozenset([*self.close_ids, *self.opener_ids])

    def separator(self, held: Sequence[int]) -> list[int]:
        """Return what belongs between `held` and the next turn: nothing, unless it was closed.

        A newline behind Qwen's `<|im_end|>`; the model stops at the close, so the newline that
        the template writes there is still missing.
        """
        return list(self.behind) if held and held[-1] in self.close_ids else []

    def append(self, sampled: Sequence[int], tail: Sequence[int]) -> list[int]:
        """Return what to put behind `sampled` so that `tail` follows a closed turn.

        Args:
            sampled: one reply, whatever it ended with; it stays.
            tail: what the template writes behind the close: separator, messages, generation
                prompt. Where the next role token closes, it begins with that token.
        """
        ids = list(tail)
        if not self.close_ids:
            if sampled and ids and sampled[-1] == ids[0] and ids[0] in self.opener_ids:
                return ids[1:]  # the model wrote the next turn's role token as its stop
            return ids
        closed = next(
            (i for i in range(len(sampled) - 1, -1, -1) if sampled[i] in self.close_ids), None
        )
        if closed is not None:
            beyond = list(sampled[closed + 1 :])
            if ids[: len(beyond)] == beyond:
                return ids[len(beyond) :]
        return [self.close_ids[0], *ids]


def choose_rule(name: str, vocabulary: Vocabulary, templates: Sequence[str]) -> str:
    """Return the name of the rule for `model.boundaries`: itself, a row of the table, or derived.

    `auto` takes the first row whose close and openers are atomic in the vocabulary and written in
    the template.

    Raises:
        ConfigError: an unknown name, or a row whose tokens the vocabulary lacks.
    """
    if name == DERIVED:
        return name
    if name == AUTO:
        return next(
            (known for known, rule in BOUNDARIES.items() if _fits(rule, vocabulary, templates)),
            DERIVED,
        )
    rule = BOUNDARIES.get(name)
    if rule is None:
        raise ConfigError(
            f"model.boundaries: unknown rule {name!r}; known: {AUTO}, {DERIVED}, "
            + ", ".join(BOUNDARIES)
        )
    for token in (*rule.closes[:1], *rule.openers):
        if vocabulary.token_id(token) is None:
            raise ConfigError(
                f"model.boundaries: {name!r} needs {token}, which the vocabulary lacks; "
                f"use {AUTO!r} or {DERIVED!r}"
            )
    return name


def declared(name: str, vocabulary: Vocabulary, stop_ids: Sequence[int]) -> Boundary:
    """Return a row of the table over a vocabulary.

    Args:
        name: a key of `BOUNDARIES` whose tokens the vocabulary has.
        vocabulary: gives the ids.
        stop_ids: further ids that end a generation.
    """
    rule = BOUNDARIES[name]
    closes = _ids(rule.closes, vocabulary)
    stops = [*closes, *_ids(rule.stops, vocabulary), *stop_ids]
    return Boundary(
        name=name,
        close_ids=tuple(closes),
        behind=tuple(vocabulary.encode(rule.behind)),
        assistant=rule.assistant,
        opener_ids=frozenset(_ids(rule.openers, vocabulary)),
        stop_ids=tuple(dict.fromkeys(stops)),
        trim_ids=frozenset(number for text in rule.trim for number in vocabulary.encode(text)),
        roles=rule.roles,
    )


def appended_messages(
    held: Sequence[Message], given: Sequence[Message], roles: Sequence[str] = ROLES
) -> list[Message]:
    """Return the messages of `given` behind those that are held already.

    Args:
        held: the conversation as it was rendered and answered.
        given: the whole conversation as it came back.
        roles: that may be appended.

    Raises:
        MergeFault: `given` is shorter, tells an earlier message otherwise, or appends a role that
            may not be; `detail` is `history` or `role`.
    """
    found = first_difference(held, given)
    if found is not None:
        place, part = found
        what = "the messages end before it" if part == "missing" else f"its {part} differs"
        raise MergeFault(f"message {place} is not the one that was sent: {what}", detail="history")
    new = list(given[len(held) :])
    check_roles(new, roles, len(held))
    return new


def check_roles(messages: Sequence[Message], roles: Sequence[str], first: int = 0) -> None:
    """Refuse roles that may not be appended.

    Raises:
        MergeFault: names the role and the index, counted from `first`; `detail` is `role`.
    """
    for place, message in enumerate(messages):
        role = message.get("role")
        role = "system" if role == "developer" else role
        if role not in roles:
            raise MergeFault(
                f"cannot extend: message {first + place} has role {role!r}; behind an assistant "
                f"turn this template takes {', '.join(roles) or 'nothing'}",
                detail="role",
            )


def _fits(rule: BoundaryRule, vocabulary: Vocabulary, templates: Sequence[str]) -> bool:
    tokens = (*rule.closes[:1], *rule.openers)
    if any(vocabulary.token_id(token) is None for token in tokens):
        return False
    # The close may be written as the variable of the vocabulary's end-of-sequence token.
    closes = [(close, "eos_token") for close in rule.closes[:1]]
    wanted = [*closes, *((opener,) for opener in rule.openers)]
    return all(any(t in template for t in spelled for template in templates) for spelled in wanted)


def _ids(tokens: Sequence[str], vocabulary: Vocabulary) -> list[int]:
    found = [vocabulary.token_id(token) for token in tokens]
    return [number for number in found if number is not None]
