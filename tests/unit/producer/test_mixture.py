"""Sources of several environments: one order, each with its own rows, and what is refused."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from producer.app import make_supply
from producer.identity import fingerprint_of
from producer.mixture import AnyRows, MixedOrder, Mixture, open_rows, order_of
from producer.order import MAX_GROUPS
from producer.sources import BadRow
from rollstream.config import load_settings
from rollstream.errors import ConfigError
from rollstream.settings import Settings
from rollstream.wire import decode_prompt

Make = Callable[..., AnyRows]


def settings_of(**tables: Any) -> Settings:
    """Return settings of these tables."""
    return Settings.model_validate(tables)


def a_file(folder: Path, name: str, rows: int, **columns: Any) -> str:
    """Write rows whose prompts say file and number; return the source's spec."""
    path = folder / f"{name}.jsonl"
    lines = (json.dumps({"prompt": f"{name} {k}", **columns}) for k in range(rows))
    path.write_text("\n".join(lines))
    return f"jsonl:{path}"


@pytest.fixture
def opened() -> Iterator[Make]:
    """Open the rows of settings; they are closed behind the test."""
    with contextlib.ExitStack() as stack:

        def make(settings: Settings) -> AnyRows:
            rows = open_rows(settings)
            stack.callback(rows.close)
            return rows

        yield make


def mixed(folder: Path, weights: dict[str, float], rows: int = 10, **producer: Any) -> Settings:
    """Return settings of environments with a file of `rows` each."""
    envs = {
        name: {"weight": weight, "source": a_file(folder, name, rows)}
        for name, weight in weights.items()
    }
    return settings_of(env=envs, producer=producer)


def prompts_of(settings: Settings, rows: AnyRows) -> list[str]:
    """Return the prompt of every group."""
    order = order_of(settings, rows)
    return [rows.row(order.row(g)).values["prompt"] for g in range(order.total)]


def test_mixture_gives_every_row_the_environment_of_its_source(
    tmp_path: Path, opened: Make
) -> None:
    settings = mixed(tmp_path, {"code": 1, "math": 2}, rows=6)
    supply = make_supply(settings, opened(settings))
    supply.check()
    records = [r for g in range(12) for r in supply.call(g).args if isinstance(r, bytes)]
    groups = [decode_prompt(record, g, 8) for g, record in enumerate(records)]
    assert [group.env for group in groups] == ["math", "code", "math"] * 4
    assert all(str(group.prompt).startswith(group.env) for group in groups)


def test_mixture_goes_through_all_rows_of_each_environment_before_one_comes_again(
    tmp_path: Path, opened: Make
) -> None:
    settings = mixed(tmp_path, {"a": 3, "b": 1}, rows=8, epochs=4, shuffle_seed=1)
    rows = opened(settings)
    prompts = prompts_of(settings, rows)
    assert len(prompts) == 64
    own = {name: [p for p in prompts if p.startswith(name)] for name in "ab"}
    assert {name: len(found) for name, found in own.items()} == {"a": 48, "b": 16}
    shuffles = [
        tuple(int(p.split()[1]) for p in found[k : k + 8])
        for found in own.values()
        for k in range(0, len(found), 8)
    ]
    assert {tuple(sorted(shuffle)) for shuffle in shuffles} == {tuple(range(8))}
    assert len(set(shuffles)) == 8  # another one each epoch, and in each environment


def test_mixture_without_a_seed_keeps_the_order_of_the_files(tmp_path: Path, opened: Make) -> None:
    settings = mixed(tmp_path, {"a": 1, "b": 1}, rows=3)
    assert prompts_of(settings, opened(settings)) == ["a 0", "b 0", "a 1", "b 1", "a 2", "b 2"]


def test_mixture_stands_for_the_same_wherever_its_tables_stand_and_whatever_is_asked_first(
    tmp_path: Path, opened: Make
) -> None:
    first = mixed(tmp_path, {"a": 0.6, "b": 0.2, "c": 0.2}, epochs=2, shuffle_seed=3)
    other = mixed(tmp_path, {"c": 1, "a": 3, "b": 1}, epochs=2, shuffle_seed=3)
    rows, same = opened(first), opened(other)
    expected = prompts_of(first, rows)
    order = order_of(other, same)
    backwards = [same.row(order.row(g)).values["prompt"] for g in reversed(range(order.total))]
    assert backwards == expected[::-1]
    assert fingerprint_of(first, rows) == fingerprint_of(other, same)


def test_the_fingerprint_tells_weights_and_sources_apart(tmp_path: Path, opened: Make) -> None:
    base = {"a": 1.0, "b": 1.0}
    prints = set()
    for weights, rows in ((base, 5), ({"a": 2.0, "b": 1.0}, 5), (base, 6), ({"a": 1.0}, 5)):
        settings = mixed(tmp_path, weights, rows=rows)
        prints.add(fingerprint_of(settings, opened(settings)))
    assert len(prints) == 4


def test_an_environment_without_a_source_has_no_prompts(tmp_path: Path, opened: Make) -> None:
    envs = {"train": {"source": a_file(tmp_path, "train", 4)}, "exam": {"max_turns": 2}}
    settings = settings_of(env=envs)
    rows = opened(settings)
    assert isinstance(rows, Mixture)
    assert rows.shares == {"train": 1.0}
    assert prompts_of(settings, rows) == [f"train {k}" for k in range(4)]


def test_a_row_that_names_another_environment_than_its_sources_is_bad(
    tmp_path: Path, opened: Make
) -> None:
    good = a_file(tmp_path, "a", 2, task="a")
    bad = a_file(tmp_path, "b", 2, task="a")
    settings = settings_of(
        env={"a": {"source": good}, "b": {"source": bad}}, producer={"keys": {"env": "task"}}
    )
    supply = make_supply(settings, opened(settings))
    with pytest.raises(ConfigError, match=r"every row is bad.*b\.jsonl:1: task \(env\): 'a' in"):
        supply.check()
    supply.call(0)
    with pytest.raises(BadRow):
        supply.call(1)


def test_one_source_of_bad_rows_is_an_error_even_where_bad_rows_are_skipped(
    tmp_path: Path, opened: Make
) -> None:
    envs = {"a": {"source": a_file(tmp_path, "a", 9)}, "b": {"source": a_file(tmp_path, "b", 1)}}
    (tmp_path / "b.jsonl").write_text('{"question": "?"}\n')
    settings = settings_of(env=envs, producer={"on_bad_row": "skip"})
    with pytest.raises(ConfigError, match=r"every row is bad; the first: .*b\.jsonl:1"):
        make_supply(settings, opened(settings)).check()


@pytest.mark.parametrize(
    ("env", "producer", "says"),
    [
        ({"a": {"source": "A"}}, {"source": "A"}, r"producer\.source and env\.a\.source are both"),
        ({"a": {"weight": 2.0}}, {"source": "A"}, r"env\.a\.weight is set, and env\.a\.source is"),
        ({"a": {"source": "A"}, "b": {"weight": 1.0}}, {}, r"env\.b\.weight needs env\.b\.source"),
        ({"a": {"source": "A"}, "b": {"source": "nope:x"}}, {}, r"env\.b\.source = 'nope:x'"),
        ({"a": {"source": "jsonl:/none"}}, {}, r"env\.a\.source: /none cannot be read"),
        ({"a": {"source": "reasoning_gym:nope"}}, {}, r"env\.a\.source: reasoning_gym has no"),
        ({"a": {"source": "A"}, "b": {"source": "A", "weight": 1e-9}}, {}, r"env\.b\.weight ="),
        ({"a": {}}, {}, r"producer\.source is empty"),
    ],
)
def test_mixture_refuses_what_mixes_nothing(
    env: dict[str, dict[str, Any]], producer: dict[str, Any], says: str, tmp_path: Path
) -> None:
    file = a_file(tmp_path, "a", 2)
    tables = {name: {k: file if v == "A" else v for k, v in t.items()} for name, t in env.items()}
    given = {key: file if value == "A" else value for key, value in producer.items()}
    with pytest.raises(ConfigError, match=says):
        open_rows(settings_of(env=tables, producer=given))


@pytest.mark.parametrize("weight", ["inf", "nan", "0", "-1"])
def test_a_weight_is_a_positive_number(weight: str) -> None:
    argv = [f"--env.a.weight={weight}"]
    with pytest.raises(ConfigError, match=r"env\.a\.weight"):
        load_settings(argv, prog="test", environ={}, folder=Path("/nonexistent"))


def test_mixed_order_numbers_no_more_groups_than_a_run_can(tmp_path: Path, opened: Make) -> None:
    rows = opened(mixed(tmp_path, {"a": 1, "b": 1}, rows=1))
    assert isinstance(rows, Mixture)
    order = MixedOrder(rows, epochs=MAX_GROUPS // 2)
    assert order.row(order.total - 1) == 1
    for beyond in (-1, order.total):
        with pytest.raises(IndexError):
            order.row(beyond)
    with pytest.raises(ConfigError, match=r"producer\.epochs"):
        MixedOrder(rows, epochs=MAX_GROUPS)
