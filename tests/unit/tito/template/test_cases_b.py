"""Theme B of the hard cases: chat templates that are not append-only, and odd messages.

The toy vocabulary with templates of ours, and where it matters Qwen3's published vocabulary with a
template in Qwen3's format.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigError, MergeFault
from tests import toy
from tests.unit.tito.template.folder import LLAMA, backend, load, template, write_folder
from worker.tito.backend import RenderersBackend
from worker.tito.template import TemplateBackend
from worker.tito.template.files import TemplateSource

A1 = [4, 30, 5, 30, 2]
"""<think>hello</think>hello and the close."""
HISTORY = [{"role": "user", "content": "hi"}]


def calling(arguments: Any = "{}", **message: Any) -> dict[str, Any]:
    """Return an assistant message with one call."""
    function = {"name": "f"} | ({} if arguments is ... else {"arguments": arguments})
    call = {"id": "c1", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]} | message


def answered(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [*HISTORY, message, {"role": "tool", "content": "ok", "tool_call_id": "c1"}]


@pytest.fixture(scope="module")
def published(qwen: RenderersBackend) -> TemplateBackend:
    """Qwen3's vocabulary under the template in its format."""
    source = TemplateSource(template("qwen_like"), special={"eos_token": "<|im_end|>"})
    return TemplateBackend.load(qwen.tokenizer, source)


def test_case_12_dropped_reasoning_stays_where_the_engine_saw_it(tmp_path: Path) -> None:
    renderer = backend(tmp_path, "strip")
    played = toy.play(renderer, toy.HI, [toy.a_completion(A1), toy.a_completion(toy.A2)], [toy.NO])
    assert played.requests[1] == [*toy.P0, *A1, *toy.U1]
    # The template itself would have dropped it: this is the drift that does not happen.
    whole = renderer.render(
        [*toy.HI, {"role": "assistant", "content": "<think>hello</think>hello"}, *toy.NO], None
    )
    assert whole.tolist() == [*toy.P0, 30, 2, *toy.U1]


def test_case_12_published_vocabulary_keeps_dropped_reasoning_too(
    published: TemplateBackend,
) -> None:
    reply = published.encode_raw("<think>\nhm\n</think>\n\nyes<|im_end|>").tolist()
    played = toy.play(published, toy.HI, [toy.a_completion(reply), toy.a_completion([9])], [toy.NO])
    assert published.decode(toy.array(played.requests[1])) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes"
        "<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
    )


def test_case_13_the_new_user_turn_is_in_the_next_prompt_exactly_once(tmp_path: Path) -> None:
    renderer = backend(tmp_path, "strip")
    played = toy.play(renderer, toy.HI, [toy.a_completion(A1), toy.a_completion(toy.A2)], [toy.NO])
    sent = played.requests[1]
    places = [i for i in range(len(sent)) if sent[i : i + 2] == [1110, 1111]]
    assert places == [len(toy.P0) + len(A1) + 4]
    assert played.sample.loss_mask is not None
    first, second = played.sample.calls
    assert second.start - first.end == len(toy.U1)


@pytest.mark.parametrize("forgets", ["message.content != 'no'", "message.content | length > 3"])
def test_case_13_template_that_loses_the_turn_is_a_fault_not_silence(
    tmp_path: Path, forgets: str
) -> None:
    text = template("toy").replace("~ message.content", f"~ (message.content if {forgets} else '')")
    renderer = backend(tmp_path, text=text)
    reply = toy.array(toy.A1)
    with pytest.raises(MergeFault, match=r"does not write the text of message 0 \(role 'user'\)"):
        renderer.extend(toy.array(toy.P0), reply, toy.NO, None)
    said = [{"role": "user", "content": "nope"}]
    assert 1112 in renderer.extend(toy.array(toy.P0), reply, said, None)


@pytest.mark.parametrize("said", ["日本", "🙂", "?!", '"', " \\ ", "é\n", "a", "ok " * 500])
@pytest.mark.parametrize("form", ["", " | tojson", " | tojson(ensure_ascii=true)"])
def test_case_13_no_text_is_taken_for_lost_that_is_there(
    tmp_path: Path, said: str, form: str
) -> None:
    shown = f"(message.content{form} if message.role == 'user' else message.content)"
    text = template("toy").replace("~ message.content", f"~ {shown}")
    renderer = backend(tmp_path, text=text)
    new = [{"role": "user", "content": said}, {"role": "user", "content": ""}]
    assert renderer.extend(toy.array(toy.P0), toy.array(toy.A1), new, None).size


@pytest.mark.parametrize("said", ["日本", "🙂", "?!"])
def test_case_13_text_without_words_is_missed_as_well(tmp_path: Path, said: str) -> None:
    text = template("toy").replace("~ message.content", "~ (message.content if hide != it else '')")
    text = text.replace("hide != it", f"message.content != {said!r}")
    renderer = backend(tmp_path, text=text)
    new = [*toy.OK, {"role": "user", "content": said}]
    with pytest.raises(MergeFault, match="does not write the text of message 1"):
        renderer.extend(toy.array(toy.P0), toy.array(toy.A1), new, None)


@pytest.mark.parametrize("name", ["toy", "items", "qwen_like", "text_arguments", "glm_like"])
def test_case_15_null_and_absent_content_are_the_empty_text(tmp_path: Path, name: str) -> None:
    renderer = backend(tmp_path, name)
    absent = calling()
    del absent["content"]
    wanted = renderer.render(answered(calling(content="")), None).tolist()
    for message in (calling(content=None), absent, calling(content=[])):
        assert renderer.render(answered(message), None).tolist() == wanted
    text = renderer.decode(toy.array(wanted))
    assert "None" not in text
    assert "null" not in text
    assert "<tool_call>" in text


def test_case_15_published_vocabulary(published: TemplateBackend) -> None:
    wanted = published.render(answered(calling(content="")), None).tolist()
    assert published.render(answered(calling(content=None)), None).tolist() == wanted
    assert "None" not in published.decode(toy.array(wanted))


@pytest.mark.parametrize("name", ["items", "glm_like"])
def test_case_16_arguments_as_json_text_render_as_the_object(tmp_path: Path, name: str) -> None:
    renderer = backend(tmp_path, name)
    history = answered(calling('{"a": 3}'))
    before = copy.deepcopy(history)
    ids = renderer.render(history, None).tolist()
    assert ids == renderer.render(answered(calling({"a": 3})), None).tolist()
    assert history == before  # the client's string stays what it was
    assert "a=3" in renderer.decode(toy.array(ids)) or name == "glm_like"


def test_case_16_template_that_joins_text_gets_the_clients_own_text(tmp_path: Path) -> None:
    renderer = backend(tmp_path, "text_arguments")
    spaced = '{ "a":3 ,"b": "é" }'
    text = renderer.decode(renderer.render(answered(calling(spaced)), None))
    assert f"<tool_call>f {spaced}</tool_call>" in text
    text = renderer.decode(renderer.render(answered(calling({"a": 3, "b": "é"})), None))
    assert '<tool_call>f {"a": 3, "b": "é"}</tool_call>' in text


@pytest.mark.parametrize("name", ["items", "toy", "qwen_like", "text_arguments", "glm_like"])
@pytest.mark.parametrize("arguments", ["null", "[1,2]", '"x"', "{bad", ...])
def test_case_17_arguments_that_are_no_object_render_and_stay(
    tmp_path: Path, name: str, arguments: Any
) -> None:
    renderer = backend(tmp_path, name)
    history = answered(calling(arguments))
    before = copy.deepcopy(history)
    ids = renderer.render(history, None).tolist()
    assert ids == renderer.render(history, None).tolist()
    assert history == before
    block = renderer.decode(toy.array(ids)).split("<tool_call>")[1].split("</tool_call>")[0]
    if arguments is ...:
        assert "null" not in block  # nothing was made up
        assert "None" not in block
    else:
        shown = json.dumps(arguments)[1:-1] if name == "toy" else arguments
        assert shown in block


def test_case_18_developer_is_system(tmp_path: Path, published: TemplateBackend) -> None:
    asked = [{"role": "developer", "content": "be kind"}, *toy.HI]
    system = [1, 20, 10, 1098, 1101, 1032, 1107, 1105, 1110, 1100, 2, 10]
    assert backend(tmp_path).render(asked, None).tolist() == [*system, *toy.P0]
    as_system = [{"role": "system", "content": "be kind"}, *toy.HI]
    assert published.render(asked, None).tolist() == published.render(as_system, None).tolist()


def test_case_18_late_system_stays_in_its_place_on_every_turn(tmp_path: Path) -> None:
    renderer = backend(tmp_path)
    late = [{"role": "system", "content": "A"}, *toy.HI, {"role": "developer", "content": "B"}]
    assert renderer.decode(renderer.render(late, None)) == (
        "<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>system\nB<|im_end|>\n<|im_start|>assistant\n"
    )
    suffix = renderer.extend(toy.array(toy.P0), toy.array(toy.A1), late[2:], None)
    assert suffix.tolist() == [10, 1, 20, 10, 1066, 2, 10, 1, 22, 10]


HOIST = """\
{%- for m in messages -%}{%- if m.role == 'system' -%}
{{- '<|im_start|>system\n' ~ m.content ~ '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}{%- if m.role != 'system' -%}
{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' -}}{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""


def test_case_18_template_that_moves_a_late_system_message_refuses_it_everywhere(
    tmp_path: Path,
) -> None:
    renderer = backend(tmp_path, text=HOIST)
    late = [*toy.HI, {"role": "system", "content": "B"}]
    with pytest.raises(ValueError, match=r"message 1: .* role 'system' behind other messages"):
        renderer.render(late, None)
    with pytest.raises(MergeFault, match=r"message 0 has role 'system'.*written 0 times"):
        renderer.extend(toy.array(toy.P0), toy.array(toy.A1), late[1:], None)
    assert renderer.render([late[1], late[0]], None).tolist()[:5] == [1, 20, 10, 1066, 2]


def test_case_19_tool_and_user_follow_in_one_append(tmp_path: Path) -> None:
    renderer = backend(tmp_path)
    suffix = renderer.extend(
        toy.array(toy.P0), toy.array(toy.A1), [*toy.OK, *toy.NO], None
    ).tolist()
    assert suffix == [10, 1, 23, 10, 1111, 1107, 2, 10, 1, 21, 10, 1110, 1111, 2, 10, 1, 22, 10]


def test_case_19_published_vocabulary(published: TemplateBackend, qwen: RenderersBackend) -> None:
    window = published.render(toy.HI, None)
    reply = published.encode_raw("yes<|im_end|>")
    new = [*toy.OK, *toy.NO]
    suffix = published.extend(window, reply, new, None)
    assert suffix.tolist() == qwen.extend(window, reply, new, None).tolist()


def test_case_19_forbidden_role_is_named_with_its_index_and_the_templates_words(
    tmp_path: Path,
) -> None:
    renderer = backend(tmp_path, "mistral_like")
    window, reply = renderer.render(toy.HI, None), renderer.encode_raw("yes</s>")
    assert renderer.decode(renderer.extend(window, reply, toy.NO, None)) == "[INST] no[/INST]"
    with pytest.raises(MergeFault, match=r"message 1 \(role 'user'\) here: Roles must altern") as f:
        renderer.extend(window, reply, [*toy.NO, *toy.NO], None)
    assert f.value.detail == "template"
    with pytest.raises(MergeFault, match=r"message 0 has role 'tool'; .* takes user \(the temp"):
        renderer.extend(window, reply, toy.OK, None)
    with pytest.raises(ValueError, match=r"message 1 \(role 'user'\): .* not take it here: Roles"):
        renderer.render([*toy.HI, *toy.NO], None)
    with pytest.raises(ValueError, match=r"message 0 \(role 'system'\)"):
        renderer.render([{"role": "system", "content": "A"}, *toy.HI], None)


def test_case_21_tools_are_one_text_on_every_turn_and_equal_to_hugging_faces(
    published: TemplateBackend,
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    function = {"parameters": {"type": "object", "properties": {}}, "name": "f", "description": "ü"}
    spec = {"type": "function", "function": function}
    ids = published.render(toy.HI, [spec])
    theirs = render_jinja_template(
        [toy.HI], [spec], chat_template=template("qwen_like"), add_generation_prompt=True
    )[0][0]
    assert ids.tolist() == published.encode_raw(theirs).tolist()
    flat = {"type": "function", **function}
    assert published.render(toy.HI, [flat]).tolist() == ids.tolist()
    longer = [*toy.HI, {"role": "assistant", "content": "yes"}, *toy.NO]
    tools_end = ids.tolist().index(151645)
    assert published.render(longer, [spec]).tolist()[:tools_end] == ids.tolist()[:tools_end]
    with pytest.raises(ValueError, match="tool 0: expected"):
        published.render(toy.HI, [{"type": "web_search"}])


def test_case_21_tools_change_no_suffix(published: TemplateBackend) -> None:
    spec = {"type": "function", "function": {"name": "f", "parameters": {}}}
    window, reply = published.render(toy.HI, [spec]), published.encode_raw("yes<|im_end|>")
    with_tools = published.extend(window, reply, toy.OK, [spec]).tolist()
    assert with_tools == published.extend(window, reply, toy.OK, None).tolist()


BOS = "<|begin_of_text|>"


@pytest.mark.parametrize(
    ("written", "post_bos"), [(True, ""), (False, BOS), (True, BOS)], ids=["own", "post", "both"]
)
def test_case_22_one_bos_at_the_beginning_whoever_writes_it(
    tmp_path: Path, written: bool, post_bos: str
) -> None:
    text = template("llama_like")
    text = text if written else text.replace("{{- bos_token -}}", "")
    renderer = backend(tmp_path, "llama_like", text=text, post_bos=post_bos)
    bos = renderer.tokenizer.token_id(BOS)
    prompt = renderer.render(toy.HI, None).tolist()
    assert prompt[0] == bos
    assert prompt.count(bos) == 1
    reply = renderer.encode_raw("yes<|eot_id|>").tolist()
    replies = [toy.a_completion(reply)] * 3
    played = toy.play(renderer, toy.HI, replies, [toy.NO, [{"role": "user", "content": BOS}]])
    assert played.requests[2].count(bos) == 1


def test_case_22_no_bos_where_nobody_writes_one(tmp_path: Path) -> None:
    text = template("llama_like").replace("{{- bos_token -}}", "")
    renderer = backend(tmp_path, "llama_like", text=text)
    assert renderer.tokenizer.token_id(BOS) not in renderer.render(toy.HI, None).tolist()


def test_case_22_template_that_repeats_the_bos_is_refused(tmp_path: Path) -> None:
    text = template("mistral_like").replace("{{- bos_token -}}", "")
    text = text.replace("{{- '[INST] '", "{{- bos_token ~ '[INST] '")
    with pytest.raises(ConfigError, match=r"BOS <s> again in front of message 2 \(role 'user'\)"):
        backend(tmp_path, "mistral_like", text=text)


def test_case_22_bos_that_opens_every_turn_is_no_bos(tmp_path: Path) -> None:
    renderer = backend(tmp_path, config={"bos_token": "<|im_start|>"})
    assert renderer.render(toy.HI, None).tolist() == toy.P0


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "text", "text": "hi"}],
        [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
        ["hi"],
    ],
)
def test_case_23_text_parts_are_the_text(tmp_path: Path, parts: Any) -> None:
    renderer = backend(tmp_path)
    assert renderer.render([{"role": "user", "content": parts}], None).tolist() == toy.P0
    window, reply = toy.array(toy.P0), toy.array(toy.A1)
    said = [{"role": "tool", "content": parts}]
    assert (
        renderer.extend(window, reply, said, None).tolist()
        == renderer.extend(window, reply, [{"role": "tool", "content": "hi"}], None).tolist()
    )


def test_case_23_part_that_is_no_text_is_refused(tmp_path: Path) -> None:
    renderer = backend(tmp_path)
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(ValueError, match="message 0: a content part of type 'image_url'"):
        renderer.render(image, None)
    with pytest.raises(MergeFault, match="message 0: a content part of type 'image_url'"):
        renderer.extend(toy.array(toy.P0), toy.array(toy.A1), image, None)


TOOL_BRANCH = """\
{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '\n' -}}
{%- if m.tool_calls is defined -%}
{{- '<tool_call>' ~ (m.tool_calls | tojson) ~ '</tool_call>' -}}
{%- else -%}{{- m.content -}}{%- endif -%}
{{- '<|im_end|>\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"""


@pytest.mark.parametrize("text", [None, TOOL_BRANCH], ids=["toy", "is defined"])
def test_case_24_empty_list_of_calls_is_a_plain_turn(tmp_path: Path, text: str | None) -> None:
    renderer = backend(tmp_path, text=text)
    said = {"role": "assistant", "content": "hello"}
    wanted = [*toy.P0, 30, 2, *toy.U1]
    for calls in ({"tool_calls": []}, {"tool_calls": None}, {}):
        ids = renderer.render([*toy.HI, said | calls, *toy.NO], None)
        assert ids.tolist() == wanted


def test_call_beside_text_is_refused_where_the_template_would_lose_it(tmp_path: Path) -> None:
    renderer = backend(tmp_path, text=TOOL_BRANCH)
    assert renderer.render(answered(calling(content=None)), None).size
    with pytest.raises(ValueError, match=r"message 1: .* tool calls of a message that also has"):
        renderer.render(answered(calling(content="I call.")), None)


def test_folder_with_llama_controls_is_no_llama_by_vocabulary_alone(tmp_path: Path) -> None:
    """`auto` looks at the template, too."""
    renderer = load(write_folder(tmp_path, template("toy"), controls=LLAMA))
    assert renderer.boundary.name == "chatml"
