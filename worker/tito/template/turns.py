"""What a chat template writes behind an assistant turn, without the history before it.

Owns the dummy conversation under which a suffix is rendered, where it is cut, and what is proven of
a template at start. Never sees the real history, never changes a sampled id. Invariant: the same
new messages give the same ids behind every turn of every conversation.

A suffix is rendered behind `[user, assistant]`, the assistant's content (and its calls, where a
tool result follows) ending in a mark that no text can hold. What stands behind the mark is what
the template writes there: the close, the separator, the new messages, the generation prompt. It is
encoded from the close on, so the ids are those of the whole text (a control token separates).

At start, for every role that may follow: its text is written once, the ids do not depend on how
long the conversation before was, or on what the assistant said last, and they are the end of the
whole text's ids. A template whose
user turns fail this is refused; another role that fails is not taken, with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollstream.errors import ConfigError, MergeFault

from ..compare import describe, differences
from ..patterns import any_of
from ..tokenizer import CUT, Tokenizer
from .boundaries import DERIVED, ROLES, Boundary, check_roles, declared
from .form import CALL_ID, KEY, NAME, SAID, USER, Form, Plain, Render, a_tool
from .sandbox import RenderError, Specs

MARK = CUT + CUT
"""Two cuts side by side: `escape` writes one inside a control string, so never two."""
NEW = "quxnew"
_WORD = re.compile(r"[A-Za-z0-9]{1,32}")
_ANYTHING = re.compile(r"\S{1,32}")
_LOOKED_AT_CHARS = 256
MANY_TURNS = 64
"""A template that tells its turns apart by their number is found up to here."""


@dataclass(frozen=True, slots=True)
class Behind:
    """What a template writes behind an assistant turn."""

    text: str
    """From the close, or the next role token, on."""
    ids: list[int]
    """Behind the close; from the role token on, where that closes the turn."""


class Turns:
    """Suffixes of one template over one vocabulary."""

    def __init__(
        self, render: Render, form: Form, tokenizer: Tokenizer, boundary: Boundary, name: str
    ) -> None:
        """Bind a boundary and try it.

        Args:
            render: messages in the template's form to text.
            form: of the template.
            tokenizer: encodes the template's text.
            boundary: declared or derived.
            name: for messages.

        Raises:
            ConfigError: the template does not write user turns behind assistant turns, or writes
                them otherwise in longer conversations.
        """
        self._render, self._form, self._tokenizer, self._name = render, form, tokenizer, name
        self._cut = any_of(tokenizer.decode([i]) for i in boundary.close_ids or boundary.opener_ids)
        self.boundary = boundary
        self.refused: dict[str, str] = {}
        """Role → why it cannot be appended."""
        self._endings: dict[str, str] = {}
        self._prompts: dict[str, str] = {}
        self._special = tokenizer.control_ids
        for role in ROLES:
            reason = self._try(role) if role in boundary.roles else "the boundary rule excludes it"
            if reason and role == "user":
                raise ConfigError(f"{name}: not append-only: {reason}")
            if reason:
                self.refused[role] = reason
        roles = tuple(role for role in ROLES if role not in self.refused)
        self.boundary = replace(boundary, roles=roles)

    def behind(self, messages: list[Plain], tools: Specs) -> Behind:
        """Return what the template writes for new messages.

        Args:
            messages: normalized, in the template's form.
            tools: normalized specs, as in the prompt.

        Raises:
            MergeFault: a role that cannot follow, a template that raises, or one that loses a
                message; `detail` is `role`, `template`, `lost_message` or `generation_prompt`.
        """
        roles = self.boundary.roles
        try:
            check_roles(messages, roles)
        except MergeFault as fault:
            reason = self.refused.get(_role(messages, roles), "")
            raise MergeFault(f"{fault.message} ({reason})", detail="role") from None
        try:
            behind = self._behind(messages, tools)
        except RenderError as error:
            place = self._culprit(messages, tools)
            raise MergeFault(
                f"cannot extend: the chat template does not take message {place} "
                f"(role {messages[place]['role']!r}) here: {error}",
                detail="template",
            ) from None
        self._check_complete(behind.text, messages)
        return behind

    def _behind(
        self,
        messages: list[Plain],
        tools: Specs,
        before: Sequence[Plain] = (),
        *,
        prompt: bool = True,
        said: str = "",
    ) -> Behind:
        dummy = self._dummy(messages, said)
        text = self._render([*before, *dummy, *messages], tools, prompt=prompt)
        mark = text.rfind(MARK)
        found = self._cut.search(text, mark + len(MARK)) if mark >= 0 else None
        if found is None:
            raise RenderError("nothing that closes a turn stands behind the assistant's")
        text = text[found.start() :]
        ids = self._tokenizer.encode(text)
        return Behind(text, ids[1:] if self.boundary.close_ids else ids)

    def _dummy(self, messages: list[Plain], said: str = "") -> list[Plain]:
        """Return the conversation before: an assistant turn that the messages can follow."""
        user = {"role": "user", "content": USER}
        results = []
        for message in messages:
            if message["role"] != "tool":
                break
            results.append(message)
        if not results or "calls" in self._form.drops:
            return [user, {"role": "assistant", "content": said + MARK}]
        calls: dict[str, Plain] = {}
        for message in results:
            call_id = message.get("tool_call_id", CALL_ID)
            function = {"name": message.get("name", NAME), "arguments": {KEY: said + MARK}}
            calls[call_id] = {"id": call_id, "type": "function", "function": function}
        beside = "calls beside text" not in self._form.drops
        return [user, self._form.assistant(said + MARK if beside else "", list(calls.values()))]

    def _culprit(self, messages: list[Plain], tools: Specs) -> int:
        for count in range(1, len(messages)):
            try:
                self._behind(messages[:count], tools)
            except RenderError:
                return count - 1
        return len(messages) - 1

    def _check_complete(self, text: str, messages: list[Plain]) -> None:
        """Refuse a suffix in which a message is missing, or that ends without the prompt."""
        ending = self._endings[messages[-1]["role"]]
        prompt = self._prompts[messages[-1]["role"]]
        if not text.endswith(ending) or (prompt and text.count(prompt) > 1):
            raise MergeFault(
                "cannot extend: the suffix does not end with one generation prompt "
                f"({ending!r}): {text[-80:]!r}",
                detail="generation_prompt",
            )
        text = self._tokenizer.unescape(text)
        place = 0
        for index, message in enumerate(messages):
            spelled = _spellings(self._tokenizer.unescape(message["content"]))
            found = [at for piece in spelled if (at := text.find(piece, place)) >= 0]
            if spelled and not found:
                raise MergeFault(
                    f"cannot extend: the chat template does not write the text of message {index} "
                    f"(role {message['role']!r})",
                    detail="lost_message",
                )
            place = min(found, default=place)

    def _try(self, role: str) -> str:
        """Return why a role cannot be appended, empty where it can."""
        new = [_new(role)]
        try:
            behind = self._behind(new, None)
        except RenderError as error:
            return f"the template says: {error}"
        if behind.text.count(NEW) != 1:
            return f"its text is written {behind.text.count(NEW)} times"
        self._endings[role] = behind.text[behind.text.find(NEW) + len(NEW) :]
        unprompted = self._behind(new, None, prompt=False).text
        self._prompts[role] = _more(behind.text, unprompted)
        spoken = self._spoken(new)
        if not self._prompts[role] and self._controls(spoken) > self._controls(self._endings[role]):
            return f"it writes no generation prompt (an assistant turn begins with {spoken!r})"
        # Without the mark: a cut would separate what the close must separate.
        text = self._render([*self._dummy(new), *new]).replace(MARK, SAID)
        whole = self._tokenizer.encode(text)
        alone = self._tokenizer.encode(behind.text)
        reason = self._differs(whole[-len(alone) :], alone)
        if reason:
            return f"message 2 has other ids in the whole text: {reason}"
        for before, said in self._others():
            try:
                longer = self._behind(new, None, before, said=said)
            except RenderError as error:
                return f"the template refuses it as message {len(before) + 2}: {error}"
            reason = self._differs(longer.ids, behind.ids)
            if reason:
                return (
                    f"message {len(before) + 2} (role {role!r}) is written otherwise than "
                    f"message 2{' behind another answer' if said else ''}: {reason}"
                )
        return self._completes(behind.text)

    def _spoken(self, new: list[Plain]) -> str:
        """Return what stands between a message and the assistant's answer to it."""
        said = {"role": "assistant", "content": SAID}
        try:
            text = self._render([*self._dummy(new), *new, said], prompt=False)
        except RenderError:
            return ""
        return text[text.rfind(NEW) + len(NEW) : text.rfind(SAID)]

    def _controls(self, text: str) -> int:
        """Return how many control tokens a text of the template's has."""
        return sum(number in self._special for number in self._tokenizer.encode(text))

    def _others(self) -> list[tuple[list[Plain], str]]:
        """Return (beginning, what was said last) of other conversations that the template takes."""
        user, said = {"role": "user", "content": USER}, {"role": "assistant", "content": SAID}
        found: list[tuple[list[Plain], str]] = [([], f"{SAID}, 7 {SAID}.\n")]
        found += [([user, said] * count, "") for count in (1, 2, MANY_TURNS)]
        tool = _new("tool", "quxresult")
        call = self._dummy([tool])[1]
        for before in ([{"role": "system", "content": "quxsystem"}], [user, call, tool, said]):
            try:
                self._render([*before, user])
            except RenderError:
                continue
            found.append((before, ""))
        return found

    def _completes(self, text: str) -> str:
        """Return which control string a message would make with what stands beside it, if any."""
        before, _, behind = text.partition(NEW)
        for token in sorted(self._tokenizer.controls):
            for cut in range(1, len(token)):
                if before.endswith(token[:cut]):
                    return f"a text that begins with {token[cut:]!r} would become {token}"
                if behind.startswith(token[cut:]):
                    return f"a text that ends in {token[:cut]!r} would become {token}"
        return ""

    def _differs(self, expected: list[int], got: list[int]) -> str:
        found = differences(expected, got, special_ids=self._special, decode=self._tokenizer.decode)
        return describe(found, 1) if found else ""


def derive_boundary(
    rule: str,
    render: Render,
    tokenizer: Tokenizer,
    stop_ids: Sequence[int],
    name: str,
) -> Boundary:
    """Return the boundary of a template: the declared one, held against what it renders.

    Args:
        rule: a row of the table, or `derived`.
        render: messages to text.
        tokenizer: of the vocabulary.
        stop_ids: ids that end a generation, by the model's configuration.
        name: for messages.

    Raises:
        ConfigError: no control token stands between the turns, or the declared one does not.
    """
    user = {"role": "user", "content": USER}
    said = {"role": "assistant", "content": MARK}
    new = {"role": "user", "content": NEW}
    try:
        after = _after(render([user, said], prompt=False))
        full = _after(render([user, said, new]))
        unprompted = _after(render([user, said, new], prompt=False))
    except RenderError as error:
        raise ConfigError(f"{name}: it does not render user, assistant, user: {error}") from None
    between = full[: full.find(NEW)]
    controls = tokenizer.control_ids
    ids = tokenizer.encode(between)
    places = [place for place, number in enumerate(ids) if number in controls]
    if not places:
        raise ConfigError(
            f"{name}: message 1 (role 'assistant') is followed by {between!r} {ids}, in which no "
            "token of the vocabulary closes the turn; a template needs a close that is one token"
        )
    if tokenizer.decode(ids[: places[0]]).strip():
        raise ConfigError(
            f"{name}: between the text of message 1 (role 'assistant') and what closes its turn "
            f"the template writes {tokenizer.decode(ids[: places[0]])!r} {ids[: places[0]]}; "
            "a sampled turn does not have it"
        )
    first = ids[places[0]]
    following = places[1] if len(places) > 1 else len(ids)
    closes = first in tokenizer.encode(after)
    header = _more(full, unprompted)
    derived = Boundary(
        name=DERIVED,
        close_ids=(first,) if closes else (),
        behind=tuple(ids[places[0] + 1 : following]) if closes else (),
        assistant=header if any(token in header for token in tokenizer.controls) else "",
        opener_ids=frozenset(ids[following : following + 1] if closes else [first]),
        stop_ids=tuple(dict.fromkeys([first, *stop_ids])),
        trim_ids=frozenset(),
        roles=ROLES,
    )
    if rule == DERIVED:
        return derived if closes else _with_openers(derived, render, tokenizer)
    row = declared(rule, tokenizer, stop_ids)
    _hold_against(row, derived, tokenizer, name)
    return row


def _with_openers(boundary: Boundary, render: Render, tokenizer: Tokenizer) -> Boundary:
    """Return a boundary whose turns are closed by any role's token, not only by the user's."""
    openers, controls = set(boundary.opener_ids), tokenizer.control_ids
    user, said = {"role": "user", "content": USER}, {"role": "assistant", "content": MARK}
    for role in ROLES:
        try:
            text = _after(render([user, said, _new(role)], [a_tool()]))
        except RenderError:
            continue
        ids = tokenizer.encode(text[: max(text.find(NEW), 0)])
        openers.update([number for number in ids if number in controls][:1])
    stops = tuple(dict.fromkeys([*boundary.stop_ids, *sorted(openers)]))
    return replace(boundary, opener_ids=frozenset(openers), stop_ids=stops)


def _hold_against(row: Boundary, derived: Boundary, tokenizer: Tokenizer, name: str) -> None:
    if row.close_ids:
        agrees = derived.close_ids and derived.close_ids[0] in row.close_ids
        agrees = agrees and derived.behind == row.behind
    else:
        agrees = not derived.close_ids and derived.opener_ids <= row.opener_ids
    if not agrees:
        raise ConfigError(
            f"{name}: the boundary rule {row.name!r} says that {_said(row, tokenizer)} ends an "
            f"assistant turn; behind message 1 the template writes {_said(derived, tokenizer)}; "
            "set model.boundaries to another rule, or to 'derived'"
        )


def _said(boundary: Boundary, tokenizer: Tokenizer) -> str:
    ids = [*boundary.close_ids[:1], *boundary.behind] or sorted(boundary.opener_ids)
    return f"{tokenizer.decode(ids)!r} {ids}"


def _more(text: str, beginning: str) -> str:
    """Return the generation prompt: what a template writes more when it is asked for it."""
    return text[len(beginning) :] if text.startswith(beginning) else ""


def _spellings(text: str) -> list[str]:
    """Return a piece of a message as it may stand in a suffix: itself, or in JSON.

    The longest word near the beginning; where there is no word, whatever is there.
    """
    beginning = text[:_LOOKED_AT_CHARS]
    words = _WORD.findall(beginning)
    if words:
        return [max(words, key=len)]
    found = _ANYTHING.search(beginning)
    if found is None:
        return []
    return [found[0], *(json.dumps(found[0], ensure_ascii=a)[1:-1] for a in (False, True))]


def _after(text: str) -> str:
    place = text.rfind(MARK)
    if place < 0:
        raise RenderError("the text of the assistant message is not written")
    return text[place + len(MARK) :]


def _new(role: str, text: str = NEW) -> Plain:
    message = {"role": role, "content": text}
    return message | ({"tool_call_id": CALL_ID, "name": NAME} if role == "tool" else {})


def _role(messages: list[Plain], roles: Sequence[str]) -> str:
    return next(str(message["role"]) for message in messages if message["role"] not in roles)
