"""What the start-up self-test proves, and that it refuses each kind of damage by its place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from rollstream.errors import ConfigError
from tests import toy
from worker.tito.backend import RenderersBackend
from worker.tito.ids import as_ids
from worker.tito.load import load_renderer
from worker.tito.selftest import Kind, self_test
from worker.tito.tokenizer import Tokenizer

pytestmark = pytest.mark.xdist_group("tito")


def _kinds(checked: list[Any], *, reasoning: bool) -> dict[tuple[str, ...], Kind]:
    return {one.roles: one.kind for one in checked if one.reasoning is reasoning}


def test_self_test_says_what_it_proved_of_the_toy_and_of_qwen3(qwen: RenderersBackend) -> None:
    turns = {("tool", "tool"), ("tool",), ("user",), ("tool", "user")}
    for renderer in (toy.toy_renderer(), qwen):
        checked = self_test(renderer, "x")
        assert [one.message for one in checked] == [2, 5, 7, 9] * 2
        assert all(one.num_ids > 0 for one in checked)
        assert set(_kinds(checked, reasoning=True)) == turns
        assert set(_kinds(checked, reasoning=False).values()) == {Kind.EQUAL}
    # Qwen3's template takes earlier reasoning away when a user speaks; what was seen stays.
    kinds = _kinds(self_test(qwen, "x"), reasoning=True)
    assert kinds.pop(("user",)) is Kind.APPEND_ONLY
    assert set(kinds.values()) == {Kind.EQUAL}


def test_self_test_tries_no_reasoning_where_the_family_has_none(vocabulary: Path) -> None:
    checked = self_test(load_renderer(vocabulary, "qwen3-no-thinking"), "x", thinking=False)
    assert {one.reasoning for one in checked} == {False}
    assert {one.kind for one in checked} == {Kind.EQUAL}


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda ids: [*ids, 10], r"behind message 2: extending it gives other ids"),
        (lambda ids: ids[:-1], r"behind message 2: extending it gives other ids"),
        (lambda ids: [1, *ids], r"behind message 2: the bridge changed what was held"),
        # Only for a window of other length: everything held and its tail give other suffixes.
        (lambda ids: ids if len(ids) < 200 else [*ids, 10], r"extending it gives other ids"),
        # The newline between the close and the next turn is missing.
        (lambda ids: _without_separator(ids), r"behind message 2: extending it gives other ids"),
    ],
)
def test_self_test_names_the_message_behind_which_it_fails(
    damage: Callable[[list[int]], list[int]], what: str
) -> None:
    with pytest.raises(ConfigError, match=what):
        self_test(toy.toy_renderer(damage=damage), "toy")


def _without_separator(ids: list[int]) -> list[int]:
    found = (i for i in range(len(ids)) if ids[i : i + 4] == [toy.CLOSE, 10, 1, 23])
    place = next(found, len(ids))
    return ids[: place + 1] + ids[place + 2 :]


class _Template(toy.ToyTemplate):
    """A template that a test may break."""

    def __init__(self, tokenizer: Tokenizer, change: Callable[[list[Any], list[int]], list[int]]):
        super().__init__(tokenizer)
        self._change = change

    def render_ids(self, messages: Any, **options: Any) -> list[int]:
        return self._change(messages, super().render_ids(messages, **options))


def _renderer(change: Callable[[list[Any], list[int]], list[int]]) -> RenderersBackend:
    tokenizer = toy.toy_tokenizer()
    return RenderersBackend(
        tokenizer, _Template(tokenizer, change), toy.CLOSE, (toy.THINK, toy.THINK_END)
    )


def test_self_test_refuses_a_template_that_rewrites_history_within_a_tool_cycle() -> None:
    renderer = _renderer(lambda messages, ids: [1000 + len(messages), *ids])
    with pytest.raises(
        ConfigError, match="behind message 2: the rendering of an earlier part"
    ) as e:
        self_test(renderer, "toy")
    assert re.search(r"expected \[1002\].*got \[1005\]", str(e.value))  # ids, decoded beside them


def test_self_test_takes_a_template_that_rewrites_history_when_a_user_speaks() -> None:
    def users(messages: list[Any]) -> int:
        return sum(message["role"] == "user" for message in messages)

    renderer = _renderer(lambda messages, ids: [1000 + users(messages), *ids])
    kinds = _kinds(self_test(renderer, "toy"), reasoning=False)
    assert kinds[("user",)] is kinds[("tool", "user")] is Kind.APPEND_ONLY
    assert kinds[("tool",)] is kinds[("tool", "tool")] is Kind.EQUAL


def test_self_test_refuses_a_template_that_puts_something_else_before_the_last_user() -> None:
    def moved(messages: list[Any], ids: list[int]) -> list[int]:
        if sum(message["role"] == "user" for message in messages) < 2:
            return ids
        return [*ids[:-3], 1065, *ids[-3:]]  # as templates do that show the tools again

    with pytest.raises(ConfigError, match="behind message 7: extending it gives other ids"):
        self_test(_renderer(moved), "toy")


def test_self_test_refuses_pieces_that_the_whole_text_does_not_give() -> None:
    def split(messages: list[Any], ids: list[int]) -> list[int]:
        del messages
        place = ids.index(20)  # "system", spelled in bytes: the same text in other ids
        return [*ids[:place], *(1000 + byte for byte in b"system"), *ids[place + 1 :]]

    with pytest.raises(ConfigError, match="behind message 2: the pieces of the rendering") as e:
        self_test(_renderer(split), "toy")
    assert "'system" in str(e.value)


def test_self_test_refuses_a_parser_that_does_not_read_the_templates_calls() -> None:
    class Deaf(toy.ToyTemplate):
        def parse_response(self, ids: list[int], **options: Any) -> Any:
            parsed = super().parse_response(ids, **options)
            parsed.tool_calls = []
            return parsed

    tokenizer = toy.toy_tokenizer()
    renderer = RenderersBackend(tokenizer, Deaf(tokenizer), toy.CLOSE)
    with pytest.raises(ConfigError, match=r"behind message 2: its calls are read as \[\]"):
        self_test(renderer, "toy")
    assert self_test(renderer, "toy", reads_calls=False)


def test_self_test_refuses_a_template_that_refuses_the_conversation() -> None:
    def refuse(messages: list[Any], ids: list[int]) -> list[int]:
        if any(message["role"] == "tool" for message in messages):
            raise ValueError("no tools here")
        return ids

    with pytest.raises(ConfigError, match=r"it cannot be rendered: message 3: .*role 'tool'"):
        self_test(_renderer(refuse), "toy")


def test_self_test_refuses_a_vocabulary_that_loses_text() -> None:
    renderer = toy.toy_renderer()
    renderer.decode = lambda ids: ""  # type: ignore[method-assign]  # the damage
    with pytest.raises(ConfigError, match="does not decode to the text it encoded"):
        self_test(renderer, "toy")


def test_self_test_refuses_a_vocabulary_that_reads_anybodys_text_as_control_ids() -> None:
    renderer = toy.toy_renderer()
    renderer.encode = renderer.encode_raw  # type: ignore[method-assign]  # the damage
    with pytest.raises(ConfigError, match="written by anybody, as control ids"):
        self_test(renderer, "toy")


# --- families that end a turn in other ways ------------------------------------------------------
class _Roles(toy.ToyTemplate):
    """`<|im_start|>` stands for the role tokens: a turn ends where the next one begins.

    `<|im_start|>user` and `<|im_start|>tool` are one id each here, `U` and `T`; both stop.
    """

    U, T, A = 3, 7, 1

    def _message(self, message: dict[str, Any]) -> list[int]:
        role = {"user": self.U, "tool": self.T, "assistant": self.A, "system": 6}[message["role"]]
        return [role, *self._tokenizer.encode(message["content"])]

    def _generation_prompt(self) -> list[int]:
        return [self.A]

    def get_stop_token_ids(self) -> list[int]:
        return [2, self.U, self.T]

    def bridge_to_next_turn(
        self, held: list[int], sampled: list[int], messages: list[dict[str, Any]], *, tools: Any
    ) -> Any:
        del tools
        ids = [*held, *sampled]
        for place, message in enumerate(messages):
            new = self._message(message)
            ids += new[1:] if place == 0 and new[0] == ids[-1] else new
        return type("Ids", (), {"token_ids": [*ids, *self._generation_prompt()]})()

    def parse_response(self, ids: list[int], **options: Any) -> Any:
        del options
        while ids and ids[-1] in (2, self.U, self.T):
            ids = ids[:-1]
        text = self._tokenizer.decode(ids)
        return type(
            "Parsed",
            (),
            {"content": text, "reasoning_content": None, "tool_calls": [], "reasoning_complete": 1},
        )()


@pytest.fixture
def roles() -> RenderersBackend:
    tokenizer = toy.toy_tokenizer()
    return RenderersBackend(
        tokenizer, _Roles(tokenizer), None, closes=[_Roles.U, _Roles.T], stand_in=2
    )


def test_self_test_takes_a_family_whose_turns_end_by_the_next_role(roles: RenderersBackend) -> None:
    checked = self_test(roles, "roles", reads_calls=False)
    assert {one.kind for one in checked} == {Kind.EQUAL}


@pytest.mark.parametrize(
    ("reply", "expected", "abnormal"),
    [
        ([30, 7], [1111, 1107, 1], False),  # the role token that it sampled is the result's
        ([30], [7, 1111, 1107, 1], True),  # cut: the next role token closes it
        ([], [7, 1111, 1107, 1], True),
        ([30, 2], [7, 1111, 1107, 1], True),  # another stop token stays
        ([30, 3], [7, 1111, 1107, 1], False),  # closed for a user, but a tool speaks
        ([30, 7, 30], [7, 1111, 1107, 1], False),  # text behind the end
        ([30, 7, 1111], [1107, 1], False),  # what the template writes there anyway
    ],
)
def test_turn_that_the_next_role_closes_keeps_every_ending(
    reply: list[int], expected: list[int], abnormal: bool, roles: RenderersBackend
) -> None:
    suffix = roles.extend(as_ids([3, 30, 1]), as_ids(reply), toy.OK, None)
    assert suffix.tolist() == expected
    assert roles.parse(as_ids(reply), as_ids([1])).abnormal_end is abnormal


def test_turn_that_the_next_role_closes_gets_the_role_of_whoever_speaks(
    roles: RenderersBackend,
) -> None:
    window = as_ids([3, 30, 1])
    for reply in ([30], [30, 2], [30, 7]):
        assert roles.extend(window, as_ids(reply), toy.NO, None).tolist() == [3, 1110, 1111, 1]
    assert roles.extend(window, as_ids([30, 3]), toy.NO, None).tolist() == [1110, 1111, 1]


def test_parse_executes_nothing_where_the_package_says_that_reasoning_is_open() -> None:
    class Open(toy.ToyTemplate):
        def parse_response(self, ids: list[int], **options: Any) -> Any:
            parsed = super().parse_response(ids, **options)
            parsed.reasoning_complete = False
            return parsed

    tokenizer = toy.toy_tokenizer()
    renderer = RenderersBackend(tokenizer, Open(tokenizer), toy.CLOSE)
    call = [toy.CALL, *tokenizer.encode('{"name": "f", "arguments": {}}'), toy.CALL_END, toy.CLOSE]
    assert renderer.parse(as_ids(call), as_ids([1, 22, 10])).tool_calls == []
    assert toy.toy_renderer().parse(as_ids(call), as_ids([1, 22, 10])).tool_calls


def test_turn_may_end_by_several_ids_and_be_shown_with_another() -> None:
    """As gpt-oss: a final answer ends by 3, a call by 7, and history shows `2` for the first."""

    class Harmony(toy.ToyTemplate):
        def get_stop_token_ids(self) -> list[int]:
            return [toy.END, 7]

        def bridge_to_next_turn(
            self, held: list[int], sampled: list[int], messages: Any, *, tools: Any
        ) -> Any:
            del tools
            ids = [*held, *sampled, toy.NEWLINE]
            for message in messages:
                ids += self._message(message)
            return type("Ids", (), {"token_ids": [*ids, *self._generation_prompt()]})()

    tokenizer = toy.toy_tokenizer()
    renderer = RenderersBackend(
        tokenizer, Harmony(tokenizer), toy.CLOSE, closes=[toy.END, 7], stand_in=toy.END
    )
    assert {one.kind for one in self_test(renderer, "h", reads_calls=False)} == {Kind.EQUAL}
    window = as_ids([toy.END, 10, 1, 22, 10])
    for reply, closing in [([30, 3], []), ([30, 7], []), ([30], [2]), ([30, 3, 30], [2])]:
        suffix = renderer.extend(window, as_ids(reply), toy.OK, None).tolist()
        assert suffix == [*closing, *toy.O1]


def test_renderer_without_ids_of_its_own_is_tried_by_its_stop_ids(qwen: RenderersBackend) -> None:
    class Bare:
        """Only the protocol."""

        stop_token_ids = qwen.stop_token_ids
        render, extend, parse = qwen.render, qwen.extend, qwen.parse
        encode, encode_raw, decode = qwen.encode, qwen.encode_raw, qwen.decode

    assert self_test(Bare(), "bare") == self_test(qwen, "qwen3")


def test_self_test_tries_every_control_string_of_a_small_vocabulary() -> None:
    inner = toy.toy_inner()
    inner.add_tokens([tokenizers.AddedToken("[X]", normalized=False)])
    tokenizer = Tokenizer(inner, "toy")
    tokenizer.escape = lambda text, keep=frozenset(): text.replace(  # type: ignore[method-assign]
        "<", "<<|rollstream:cut|>"
    )  # the damage: it knows brackets, and no other
    renderer = RenderersBackend(tokenizer, toy.ToyTemplate(tokenizer), toy.CLOSE)
    number = tokenizer.token_id("[X]")
    with pytest.raises(ConfigError, match=rf"'\[X\]'.* as control ids \[{number}\]|\[{number}\]"):
        self_test(renderer, "toy")
    assert number in renderer.control_ids
