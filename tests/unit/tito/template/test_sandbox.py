"""The sandbox: HF's text for ordinary templates, nothing but text from hostile ones."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigError
from worker.tito.template import sandbox
from worker.tito.template.sandbox import ChatTemplate, RenderError, plain_data

MESSAGES = [{"role": "user", "content": 'hi <é> "q"'}, {"role": "assistant", "content": "yo"}]


def rendered(source: str, messages: Any = None, **names: Any) -> str:
    given = MESSAGES if messages is None else messages
    return ChatTemplate(source).render(given, None, add_generation_prompt=True, names=names)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson }}",
        "{{ messages | tojson(indent=2) }}|{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true) }}",
        "{{ 'é' | tojson(ensure_ascii=true) }}{{ [1, 2] | tojson(separators=(',', ':')) }}",
        "{% for m in messages %}\n  {{ loop.index }}/{{ loop.length }}\n{% endfor %}",
        "{% for m in messages %}{{ loop.revindex0 }}{{ loop.nextitem is defined }}{% endfor %}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}x{% endfor %}",
        "{% for k, v in messages[0] | items %}{{ k ~ '=' ~ v }}{% endfor %}",
        "{% for m in [] %}x{% else %}none{% endfor %}{% for k in messages[0] %}{{ k }}{% endfor %}",
        "{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 2 %}{{ ns.a }}{{ dict(x=1).x }}",
        "{% generation %}{{ messages[1].content }}{% endgeneration %}!",
        "{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m(messages[0].content | trim) }}",
        "{{ messages[::-1][0].role ~ (messages | length) }}{{ 'a' * 3 }}{{ '%s-%d' % ('x', 3) }}",
        "{{ '{}'.format('y') }}{{ 'abc'.replace('b', 'x') }}{{ ', '.join(['a']) }}{{ 7 ** 2 }}",
        "{{ messages | map(attribute='role') | join(' ') }}{{ missing }}{{ bos_token }}{{ tools }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ documents }}",
        "{% for i in range(3) recursive %}{{ i }}{% endfor %}{{ 'a\\nb' | indent(2) }}",
        "{%- for m in messages -%}{%- for k in m -%}{{ loop.index0 }}{%- endfor -%}{%- endfor %}",
        "{{ messages[0].nothing is defined }}{{ messages[0].content is string }}{{ 5 // 2 }}",
    ],
)  # fmt: skip
def test_text_is_hugging_faces(source: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template(
        [MESSAGES], None, chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert rendered(source, bos_token="<s>") == theirs[0]


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ messages | attr('__class__') }}",
    "{{ (messages | map(attribute='__class__') | list)[0] }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__}' | format(messages) }}",
    "{{ dict.__call__.__func__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__['os'] }}",
    "{{ range.__self__ }}{{ loop.__init__ }}",
    "{{ namespace(__class__=1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{% include SECRET %}",
    "{% import SECRET as s %}{{ s }}",
    "{% extends SECRET %}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_hostile_template_reaches_no_file_and_no_object(tmp_path: Path, source: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the secret")
    source = source.replace("SECRET", repr(str(secret)))
    try:
        text = rendered(source)
    except RenderError:
        return
    # What did not raise is undefined, or text: nothing of Python shows.
    for word in ("secret", "class '", "function", "module", "uid=", "object at", "built-in"):
        assert word not in text
    assert MESSAGES[0]["role"] == "user"


DOUBLING = (
    "{{% set n = namespace(s={0}) %}}"
    "{{% for i in range(99) %}}{{% set n.s = n.s {1} n.s %}}{{% endfor %}}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(99) %}{{ m(n) }}{% endfor %}{% endmacro %}{{ m(1) }}",
        "{% for a in [[1]] recursive %}{{ loop([[a]]) }}{% endfor %}",
        DOUBLING.format("'a'", "~"),
        DOUBLING.format("'a'", "+"),
        DOUBLING.format("[1]", "+"),
        "{{ 'a' * 1000000000 }}",
        "{{ 1000000000 * 'a' }}",
        "{{ 10 ** 100000000 }}",
        "{% set n = namespace(i=9) %}{% for k in range(99) %}{% set n.i = n.i * n.i %}{% endfor %}",
        "{{ 'a' | center(1000000000) }}",
        "{{ 'a'.ljust(1000000000) }}",
        "{{ messages | tojson(indent=100000000) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=1000000000) }}",
        "{% set s = 'a' * 100000 %}{{ s.replace('a', s) }}",
        "{% set s = 'a' * 100000 %}{{ s | replace('a', s) }}",
        "{% set s = 'a' * 100000 %}{{ s.replace('', s) }}",
        "{% set s = 'a' * 100000 %}{{ s.join(s | list) }}",
        "{% set s = 'a' * 100000 %}{{ range(99999) | join(s) }}",
        "{% set s = 'a\n' * 1000000 %}{{ s | indent(90) }}",
        "{% set s = 'a' * 10000000 %}{% for i in range(99) %}{{ s }}{% endfor %}",
    ],
)  # fmt: skip
def test_template_that_would_run_or_grow_for_ever_is_stopped(
    monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 50_000)
    monkeypatch.setattr(sandbox, "MAX_CHARS", 20_000_000)
    with pytest.raises(RenderError):
        rendered(source)


def test_steps_are_counted_per_render_not_per_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100)
    template = ChatTemplate("{% for i in range(90) %}{% endfor %}x")
    for _ in range(3):
        assert template.render([], None, add_generation_prompt=False, names={}) == "x"


def test_renders_of_other_threads_do_not_share_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 100)
    template = ChatTemplate("{% for i in range(90) %}{{ hook() }}{% endfor %}x")
    results: list[str] = []

    def other() -> None:
        results.append(render())

    def render(hook: Any = None) -> str:
        names = {"hook": lambda: ""} if hook is None else {"hook": hook}
        return template.render([], None, add_generation_prompt=False, names=names)

    calls = iter(range(1000))

    def hook() -> str:
        if next(calls) == 5:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(10)
        return ""

    monkeypatch.setattr(sandbox, "MAX_STEPS", 200)
    assert render(hook) == "x"
    assert results == ["x"]


def test_texts_that_change_from_render_to_render_are_refused() -> None:
    with pytest.raises(RenderError, match="another prompt each time"):
        rendered("{{ messages | random }}")
    with pytest.raises(RenderError, match="undefined"):
        rendered("{{ lipsum() }}")


def test_template_errors_carry_the_templates_words() -> None:
    with pytest.raises(RenderError, match=r"^roles must alternate$"):
        rendered("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RenderError, match="can only concatenate str"):
        rendered("{{ 'a' + 1 }}")
    with pytest.raises(RenderError, match="ZeroDivisionError"):
        rendered("{{ 1 / 0 }}")


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ messages", "line 1 is no Jinja"),
        ("\n{% bad %}", "line 2 is no Jinja: Encountered unknown tag 'bad'"),
        ("x" * 1_000_001, "1000001 characters are no chat template"),
        ("{{ 'x' | nofilter }}", "No filter named"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "cannot be compiled"),
        ("{{ strftime_now('%Y') }}", "writes today's date"),
    ],
)
def test_what_is_no_template_is_refused(source: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        ChatTemplate(source)


def test_template_sees_only_plain_data() -> None:
    class Sneaky(str):
        def read(self) -> str:
            return "the secret"

    class Thing:
        def open(self) -> str:
            return "the secret"

    given = {"role": Sneaky("user"), "content": "x", "thing": Thing(), "pair": (1, True, 2.5, None)}
    assert plain_data(given) == {
        "role": "user", "content": "x", "thing": "<Thing>", "pair": [1, True, 2.5, None],
    }  # fmt: skip
    assert type(plain_data(given)["role"]) is str
    with pytest.raises(RenderError):
        rendered("{{ messages[0].role.read() }}", [given])


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("{{ '{:1000000000}'.format(1) }}", "a format has a width"),
        ("{{ '%1000000000d' % 1 }}", "a format has a width"),
        ("{{ 'a'.center(1000000000) }}", "`center` pads to more than"),
        ("{{ namespace(__class__=1) }}", "a namespace takes no private name"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "a namespace takes no private name"),
    ],
)
def test_what_is_refused_is_refused_before_it_is_made(source: str, what: str) -> None:
    with pytest.raises(RenderError, match=what):
        rendered(source)


_TWICE = {
    "a list in a list": "[ns.s, ns.s]",
    "an object": "{'a': ns.s, 'b': ns.s}",
    "a tuple": "(ns.s, ns.s)",
    "dict": "dict(a=ns.s, b=ns.s)",
    "arguments of a macro": "[many(ns.s, ns.s)] and ns.t",
    "a filter": "[1] | batch(3, ns.s) | list",
    "times": "[ns.s] * 2",
    "format": "'%s%s' % (ns.s, ns.s)",
    "method": "'{0}{0}'.format(ns.s)",
    "a block": "block(ns.s)",
}


@pytest.mark.parametrize("doubled", _TWICE.values(), ids=_TWICE.keys())
@pytest.mark.parametrize("used", ["{{ ns.s }}", "{{ ns.s | tojson }}", "{{ ns.s == ns.s }}"])
def test_what_doubles_at_every_step_is_refused(doubled: str, used: str) -> None:
    source = (
        "{% set ns = namespace(s='aaaaaaaaaa', t='') %}"
        "{% macro many() %}{% set ns.t = varargs %}{% endmacro %}"
        "{% macro block(x) %}{% set y %}{{ x }}{{ x }}{% endset %}{{ y }}{% endmacro %}"
        "{% for i in range(60) %}{% set ns.s = " + doubled + " %}{% endfor %}" + used
    )
    with pytest.raises(RenderError, match=r"more than \d+ (steps|characters)"):
        rendered(source)


LOOP = "{% for i in range(99999) %}"


@pytest.mark.parametrize(
    "source",
    [
        f"{{% set n = namespace(s='%') %}}{LOOP}{{% set n.s = n.s | urlencode %}}{{% endfor %}}",
        f"{{% set l = range(999) | list %}}{LOOP}{{% if -1 in l %}}{{% endif %}}{{% endfor %}}",
        "{{ [1] | slice(10 ** 9) | list | length }}",
        LOOP + "a" * 100_000 + "{% endfor %}",
        "{% set t %}" + LOOP + "a" * 100_000 + "{% endfor %}{% endset %}",
        "{% set s = 'a' * 60000 %}{% set t %}" + LOOP + "{{ s }}{% endfor %}{% endset %}",
        "{{ ('a' * 10000).translate({97: 'b' * 1000000}) | length }}",
        "{{ 15 | round(-(10 ** 8)) }}",
        "{{ ['a' * 8000000] * 1000 }}",
        "{{ ('%s' * 2000) % (('a' * 8000000,) * 2000) }}",
    ],
    ids=range(10),
)
def test_work_is_bounded_whatever_does_it(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_STEPS", 200_000)
    with pytest.raises(RenderError, match=r"more than \d+ (steps|characters)"):
        rendered(source)


def test_a_list_that_grows_by_a_message_at_a_time_costs_no_more_than_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = [{"role": "user", "content": "a" * 1000}] * 3000
    monkeypatch.setattr(sandbox, "MAX_STEPS", 10_000)
    source = (
        "{% set ns = namespace(l=[]) %}{% for m in messages %}{% set ns.l = ns.l + [m] %}"
        "{% endfor %}{{ ns.l | length }}"
    )
    assert rendered(source, messages) == "3000"
