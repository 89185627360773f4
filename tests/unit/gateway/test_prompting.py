"""From a client's messages to ids: the cases of odd messages, hostile ones, and who renders where.

The toy template with ids that can be spelled here, and Qwen3's published vocabulary.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollstream.errors import MergeFault
from tests import toy
from tests.toy import A1, HI, NO, O1, OK, P0, U1, array
from tests.unit.tito.template.folder import backend
from worker.gateway.prompting import MAX_ERROR_CHARS, MAX_HELD_TOOLS, Prompter
from worker.gateway.types import ErrorKind, Refusal
from worker.tito.tokenizer import LONG_TEXT_CHARS

if TYPE_CHECKING:
    from worker.tito.backend import RenderersBackend
    from worker.tito.template import TemplateBackend

Messages = list[dict[str, Any]]
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


@pytest.fixture
def template(tmp_path: Path) -> TemplateBackend:
    """The toy template as a chat template, which also writes calls."""
    return backend(tmp_path)


@pytest.fixture
def asked(template: TemplateBackend) -> Prompter:
    return Prompter(template)


def call(arguments: Any = "{}", *, name: str = "f", **fields: Any) -> dict[str, Any]:
    function = {"name": name} | ({} if arguments is ... else {"arguments": arguments})
    return {"id": "c1", "type": "function", "function": function} | fields


def turn(*calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)} | fields


def result(text: str, answers: str = "c1") -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": answers}


async def ids_of(prompter: Prompter, messages: Messages, tools: Any = None) -> list[int]:
    ids: list[int] = (await prompter.first(messages, tools)).ids.tolist()
    return ids


async def appended(prompter: Prompter, *new: dict[str, Any], **options: Any) -> list[int]:
    ids = await prompter.append(array(P0), array(A1), list(new), None, **options)
    found: list[int] = ids.tolist()
    return found


async def refusal(prompter: Prompter, messages: Messages, tools: Any = None) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await prompter.first(messages, tools)
    assert caught.value.kind is ErrorKind.INVALID
    assert len(caught.value.message) <= MAX_ERROR_CHARS + 2
    caught.value.message.encode()
    return caught.value


# --- the cases -----------------------------------------------------------------------------------
async def test_case_15_null_and_absent_content_are_the_empty_text(asked: Prompter) -> None:
    history = [*HI, turn(call()), result("ok")]
    wanted = await ids_of(asked, history)
    absent = {key: value for key, value in turn(call()).items() if key != "content"}
    for message in (turn(call(), content=None), absent, turn(call(), content=[])):
        assert await ids_of(asked, [*HI, message, result("ok")]) == wanted
    text = asked.renderer.decode(array(wanted))
    assert "None" not in text
    assert "null" not in text
    assert "<tool_call>" in text


@pytest.mark.parametrize("name", ["items", "toy", "qwen_like", "text_arguments", "glm_like"])
async def test_case_16_17_arguments_of_any_kind_render_and_stay_as_they_were(
    tmp_path: Path, name: str
) -> None:
    prompter = Prompter(backend(tmp_path, name))
    for arguments in ('{"a": 3}', "null", "[1,2]", '"x"', "{bad", ..., "", "[" * 3000):
        history = [*HI, turn(call(arguments)), result("ok")]
        before = copy.deepcopy(history)
        ids = await ids_of(prompter, history)
        assert ids == await ids_of(prompter, history)
        assert history == before
        if arguments == '{"a": 3}':
            as_object = [*HI, turn(call({"a": 3})), result("ok")]
            assert ids == await ids_of(prompter, as_object)
        if arguments is ...:
            assert "null" not in prompter.renderer.decode(array(ids))


async def test_case_18_developer_is_system_and_a_late_one_stays_in_its_place(
    asked: Prompter,
) -> None:
    system = [1, 20, 10, 1098, 1101, 1032, 1107, 1105, 1110, 1100, 2, 10]
    assert await ids_of(asked, [{"role": "developer", "content": "be kind"}, *HI]) == system + P0
    late = {"role": "developer", "content": "B"}
    whole = await ids_of(asked, [*HI, late])
    assert whole == [*P0[:-3], 1, 20, 10, 1066, 2, 10, 1, 22, 10]
    assert await appended(asked, late) == [10, 1, 20, 10, 1066, 2, 10, 1, 22, 10]


async def test_case_18_94_95_a_role_that_the_template_does_not_take_is_named_with_its_index() -> (
    None
):
    from tests.unit.tito.families import toyvocab

    prompter = Prompter(toyvocab.renderer("qwen3.5"))
    for role in ("system", "developer"):
        late = {"role": role, "content": "B"}
        said = await refusal(prompter, [*HI, late])
        assert said.param == "messages"
        assert "message 1" in said.message
        assert "system" in said.message
        window = (await prompter.first(HI, None)).ids
        end = array(prompter.renderer.stop_token_ids[:1])
        with pytest.raises(Refusal, match=r"message 3.*system") as caught:
            await prompter.append(window, end, [*OK, late], None, first_place=2)
        assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")
        # Nothing was changed: the same turn still goes on.
        assert len(await prompter.append(window, end, OK, None))
    several = [{"role": "system", "content": "A"}, *HI]
    assert await ids_of(prompter, several)


async def test_case_19_tool_and_user_follow_in_one_append(asked: Prompter) -> None:
    suffix = [10, 1, 23, 10, 1111, 1107, 2, 10, 1, 21, 10, 1110, 1111, 2, 10, 1, 22, 10]
    assert await appended(asked, *OK, *NO) == suffix
    assert await appended(asked, *OK) == O1
    assert await appended(asked, *NO) == U1


async def test_case_21_a_tool_has_the_same_ids_however_its_spec_is_spelled(
    qwen3: RenderersBackend,
) -> None:
    prompter = Prompter(qwen3)
    function = TOOL["function"]
    assert isinstance(function, dict)
    flat = {"type": "function", **function}
    turned = {"type": "function", "function": dict(reversed(function.items()))}
    wanted = qwen3.render(HI, [TOOL]).tolist()
    assert await ids_of(prompter, HI, [copy.deepcopy(TOOL)]) == wanted
    assert await ids_of(prompter, HI, [flat]) == wanted
    # Its keys stay in the client's order, as an engine's own chat route writes them, so another
    # order is another prompt; a session goes on all the same.
    assert await ids_of(prompter, HI, [turned]) == qwen3.render(HI, [turned]).tolist() != wanted
    keys = {prompter.tools_key([one]) for one in (TOOL, flat, turned)}
    assert len(keys) == 1
    other = copy.deepcopy(TOOL)
    other["function"] |= {"name": "g"}  # type: ignore[operator]
    assert prompter.tools_key([other]) not in keys
    assert prompter.tools_key([TOOL, other]) != prompter.tools_key([other, TOOL])
    assert prompter.tools_key(None) == prompter.tools_key([]) == b""
    assert (await refusal(prompter, HI, [{"type": "web_search"}])).param == "tools"


async def test_case_23_parts_are_the_joined_text_and_what_is_no_text_is_refused(
    asked: Prompter,
) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert await ids_of(asked, [{"role": "user", "content": parts}]) == P0
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    said = await refusal(asked, [*HI, image])
    assert "message 1: a content part of type 'image_url'" in said.message
    assert "role 'user'" in said.message
    with pytest.raises(Refusal, match="message 5: a content part of type 'image_url'"):
        await appended(asked, *OK, image, first_place=4)


async def test_case_24_an_empty_list_of_calls_is_a_plain_turn(asked: Prompter) -> None:
    wanted = [*P0, 30, 2, *U1]
    said: dict[str, Any] = {"role": "assistant", "content": "hello"}
    for message in (said | {"tool_calls": []}, said | {"tool_calls": None}, said):
        assert await ids_of(asked, [*HI, message, *NO]) == wanted


async def test_case_48_an_id_belongs_to_the_latest_turn(asked: Prompter) -> None:
    first, second = turn(call('{"a":1}', id="f:0")), turn(call('{"a":2}', id="f:0"))
    history = [*HI, first, result("one", "f:0"), second, result("two", "f:0")]
    text = asked.renderer.decode(array(await ids_of(asked, history)))
    assert text.index('"a": 1') < text.index("one") < text.index('"a": 2') < text.index("two")
    suffix = await appended(asked, result("two", "f:0"), reply=second)
    assert suffix == await appended(asked, {"role": "tool", "content": "two"})


async def test_case_49_results_are_put_in_the_order_of_their_calls(asked: Prompter) -> None:
    reply = turn(call(id="c_w", name="weather"), call(id="c_t", name="time"))
    weather, time = result("22C", "c_w"), result("14:05", "c_t")
    in_order = await appended(asked, weather, time)
    assert await appended(asked, time, weather, reply=reply) == in_order
    assert await appended(asked, weather, time, reply=reply) == in_order
    whole = await ids_of(asked, [*HI, reply, time, weather])
    assert whole == await ids_of(asked, [*HI, reply, weather, time])
    # Without ids the client's order stays.
    plain = [{"role": "tool", "content": text} for text in ("14:05", "22C")]
    assert await appended(asked, *plain, reply=reply) == await appended(asked, *plain)
    assert await appended(asked, *plain, reply=reply) != in_order
    with pytest.raises(Refusal, match=r"message 9: tool_call_id 'c_x' answers no call") as caught:
        await appended(asked, weather, result("?", "c_x"), reply=reply, first_place=8)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID, "messages")
    assert (
        "message 3: tool_call_id 'c_x'"
        in (await refusal(asked, [*HI, reply, weather, result("?", "c_x")])).message
    )


async def test_99_what_is_rendered_are_copies(asked: Prompter) -> None:
    history = [*HI, turn(call('{"b":1, "a":2}'), content=None), result("ok"), *NO]
    tools = [copy.deepcopy(TOOL)]
    before = copy.deepcopy((history, tools))
    await ids_of(asked, history, tools)
    await appended(asked, *history[3:], reply=history[1])
    assert (history, tools) == before


# --- hostile input -------------------------------------------------------------------------------
def nested(levels: int, *, as_object: bool = False) -> Any:
    deep: Any = 1
    for _ in range(levels):
        deep = {"a": deep} if as_object else [deep]
    return deep


def user(content: Any) -> Messages:
    return [{"role": "user", "content": content}]


REFUSED: list[tuple[str, Messages, Any, str]] = [
    ("no messages", [], None, "messages"),
    ("deep content", user(nested(10_000)), None, "messages"),
    ("deep part", user([{"type": nested(10_000)}]), None, "messages"),
    ("deep arguments", [*HI, turn(call(nested(10_000)))], None, "messages"),
    ("deep message", [nested(10_000)], None, "messages"),
    ("no message", [5], None, "messages"),  # type: ignore[list-item]
    ("calls that are no list", [*HI, turn(tool_calls=5)], None, "messages"),
    ("call that is none", [*HI, turn(tool_calls=[nested(10_000)])], None, "messages"),
    ("role", [{"role": "x\ud800" * 3000, "content": ""}], None, "messages"),
    ("content", user(7), None, "messages"),
    ("deep tool", HI, [TOOL, nested(10_000, as_object=True)], "tools"),
    ("deep schema", HI, [{"function": {"name": "f", "parameters": nested(300)}}], "tools"),
    ("tool", HI, [TOOL, 5], "tools"),
    ("tool without a name", HI, [{"type": "function", "function": {}}], "tools"),
    ("long tool", HI, [{"type": "x\ud800" * 10_000}], "tools"),
]


@pytest.mark.parametrize(("messages", "tools", "param"), [one[1:] for one in REFUSED],
                         ids=[one[0] for one in REFUSED])  # fmt: skip
@pytest.mark.parametrize("which", ["toy", "qwen3", "template"])
async def test_what_cannot_be_rendered_is_a_refusal_that_names_it(
    which: str, messages: Messages, tools: Any, param: str, qwen3: RenderersBackend,
    template: TemplateBackend,
) -> None:  # fmt: skip
    renderers: dict[str, Any] = {"toy": toy.toy_renderer(), "qwen3": qwen3, "template": template}
    renderer = renderers[which]
    prompter = Prompter(renderer)
    assert (await refusal(prompter, messages, tools)).param == param
    if messages:
        with pytest.raises(Refusal) as caught:
            await prompter.append(array(P0), array(A1), messages, tools)
        assert caught.value.kind is ErrorKind.INVALID


ANSWERED: list[tuple[str, Messages, Any]] = [
    ("NUL", user("a\x00b"), None),
    ("lone surrogate", user("a\ud800b"), None),
    ("surrogate in a name", [*HI, turn(call(name="\ud800"))], [TOOL]),
    ("arguments as deep text", [*HI, turn(call("[" * 10_000))], None),
    ("number of thousands of digits", [*HI, turn(call('{"a":' + "9" * 9000 + "}"))], None),
    ("surrogate in a tool", HI, [{"type": "function", "function": {"name": "\ud800"}}]),
    ("odd schema", HI, [{"type": "function", "function": {"name": "f", "parameters": 7}}]),
    ("long schema", HI, [{"function": {"name": "f", "parameters": {"enum": ["x" * 9] * 9999}}}]),
    ("many messages", [{"role": "user", "content": ""}] * 4_000, None),
    ("control strings", user("<|im_end|><think></tool_call>"), None),
]


@pytest.mark.parametrize(("messages", "tools"), [one[1:] for one in ANSWERED],
                         ids=[one[0] for one in ANSWERED])  # fmt: skip
async def test_odd_input_has_ids(
    messages: Messages, tools: Any, qwen3: RenderersBackend, template: TemplateBackend
) -> None:
    for renderer in (toy.toy_renderer(), qwen3, template):
        prompter = Prompter(renderer)
        assert await ids_of(prompter, messages, tools)
        assert prompter.tools_key(tools) == prompter.tools_key(copy.deepcopy(tools))


async def test_a_bug_of_ours_is_not_the_clients_fault() -> None:
    def damage(ids: list[int]) -> list[int]:
        return [*ids[:3], 999, *ids[3:]]

    prompter = Prompter(toy.toy_renderer(damage=damage))
    with pytest.raises(Refusal, match="the bridge changed what was held") as caught:
        await appended(prompter, *OK)
    assert caught.value.kind is ErrorKind.INTERNAL
    assert isinstance(caught.value.__cause__, MergeFault)


# --- who renders where ---------------------------------------------------------------------------
class Noting:
    """A renderer that notes in which thread it works, and which spec objects it is given."""

    stop_token_ids = (2,)

    def __init__(self) -> None:
        self.own: list[bool] = []
        self.specs: list[Any] = []

    def note(self, tools: Any) -> Any:
        self.own.append(threading.current_thread() is threading.main_thread())
        self.specs.append(tools)
        return array([1])

    def render(self, messages: Any, tools: Any) -> Any:
        return self.note(tools)

    def extend(self, window: Any, completion: Any, new_messages: Any, tools: Any) -> Any:
        return self.note(tools)


LONG = "x" * (LONG_TEXT_CHARS + 1)
HEAVY: list[tuple[str, Messages, Any]] = [
    ("content", user(LONG), None),
    ("parts", user([{"type": "text", "text": LONG}]), None),
    ("reasoning", [*HI, {"role": "assistant", "reasoning_content": LONG}], None),
    ("arguments", [*HI, turn(call(LONG))], None),
    ("object of arguments", [*HI, turn(call({"a": 1}))], None),
    ("count", HI * 1000, None),
    ("tools", HI, [{"type": "function", "function": {"name": "f", "description": LONG}}]),
]


@pytest.mark.parametrize(("messages", "tools"), [one[1:] for one in HEAVY],
                         ids=[one[0] for one in HEAVY])  # fmt: skip
async def test_whatever_is_heavy_is_rendered_in_a_thread(messages: Messages, tools: Any) -> None:
    renderer: Any = Noting()
    prompter = Prompter(renderer)
    await prompter.first(messages, tools)
    await prompter.append(array(P0), array(A1), messages, tools)
    assert renderer.own == [False, tools is not None]
    await prompter.first(HI, [TOOL])
    await prompter.append(array(P0), array(A1), OK, [TOOL])
    assert renderer.own[2:] == [True, True], "a thread for every small turn would cost more"


async def test_tools_are_the_same_objects_for_every_session_and_few_sets_are_held() -> None:
    renderer: Any = Noting()
    prompter = Prompter(renderer)
    for _ in range(3):
        await prompter.first(HI, [copy.deepcopy(TOOL)])
        await prompter.append(array(P0), array(A1), OK, [copy.deepcopy(TOOL)])
    assert len({id(specs) for specs in renderer.specs}) == 1
    turned = {"function": TOOL["function"], "type": "function"}
    await prompter.first(HI, [turned])
    assert renderer.specs[-1] is not renderer.specs[0], "another order is another prompt"
    for place in range(2 * MAX_HELD_TOOLS):
        await prompter.first(HI, [{"type": "function", "function": {"name": f"f{place}"}}])
    assert len(prompter._held) == MAX_HELD_TOOLS


# --- the same over Qwen3's published vocabulary --------------------------------------------------
async def test_case_15_16_17_18_24_qwen3_renders_what_is_written_in_many_ways_alike(
    qwen3: RenderersBackend,
) -> None:
    prompter = Prompter(qwen3)

    async def text_of(*messages: dict[str, Any]) -> str:
        return qwen3.decode(array(await ids_of(prompter, list(messages), [TOOL])))

    asked, end = HI[0], result("ok")
    wanted = await text_of(asked, turn(call('{"a": 3}')), end)
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 3}}\n</tool_call>' in wanted
    absent = {key: value for key, value in turn(call({"a": 3})).items() if key != "content"}
    for same in (turn(call({"a": 3})), turn(call({"a": 3}), content=None), absent):
        assert await text_of(asked, same, end) == wanted
    for odd in ("null", "[1,2]", '"x"', "{bad", "[" * 3000):
        assert odd in (await text_of(asked, turn(call(odd)), end)).replace('\\"', '"')
    assert "null" not in await text_of(asked, turn(call(...)), end)
    plain = {"role": "assistant", "content": "hello"}
    assert await text_of(asked, plain, *NO) == await text_of(asked, plain | {"tool_calls": []}, *NO)
    kind = {"role": "developer", "content": "be kind"}
    assert await text_of(kind, asked) == await text_of(kind | {"role": "system"}, asked)
    late = await text_of(asked, kind)
    assert late.endswith("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>assistant\n")


async def test_case_18_19_49_qwen3_appends_results_in_order_and_what_else_follows(
    qwen3: RenderersBackend,
) -> None:
    prompter = Prompter(qwen3)
    window = (await prompter.first(HI, [TOOL])).ids
    reply = turn(call(id="c_w", name="weather"), call(id="c_t", name="time"))
    new = [result("14:05", "c_t"), result("22C", "c_w"), *NO, {"role": "developer", "content": "B"}]
    end = array(qwen3.stop_token_ids[:1])
    ids = await prompter.append(window, end, new, [TOOL], reply=reply)
    assert qwen3.decode(ids) == (
        "\n<|im_start|>user\n<tool_response>\n22C\n</tool_response>\n<tool_response>\n14:05\n"
        "</tool_response><|im_end|>\n<|im_start|>user\nno<|im_end|>\n"
        "<|im_start|>system\nB<|im_end|>\n<|im_start|>assistant\n"
    )
