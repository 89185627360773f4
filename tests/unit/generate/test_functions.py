"""Paths of users' functions: found, checked at the start, and refused with one clear error."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from rollstream.errors import ConfigError
from worker.functions import describe, is_async, resolve
from worker.generate import multi_turn, resolve_generate, single_turn

FUNCTIONS = Path(__file__).resolve().parents[2] / "data" / "functions"
MINE = FUNCTIONS / "mine.py"


def test_built_in_names_and_paths_of_both_kinds_are_found() -> None:
    assert resolve_generate("single_turn") is single_turn
    assert resolve_generate("multi_turn") is multi_turn
    assert resolve_generate("worker.generate:multi_turn") is multi_turn
    assert resolve_generate(f"{MINE}:generate").__name__ == "generate"


def test_two_functions_of_one_file_share_its_module() -> None:
    first, second = (resolve(f"{MINE}:{name}", "reward") for name in ("reward", "lookup"))
    assert first.__globals__ is second.__globals__


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("multi_turns", "unknown generate function 'multi_turns'; did you mean 'multi_turn'?"),
        ("nonsense", "unknown generate function 'nonsense'. Built in: agent, env, multi_turn, "),
        ("no.such.module:f", "there is no module no.such.module; it must be importable from"),
        ("worker.generate:multi_turm", "has no 'multi_turm'; did you mean 'multi_turn'?"),
        (f"{MINE}:generat", "has no 'generat'; did you mean 'generate'?"),
        (f"{FUNCTIONS}/absent.py:f", "there is no file .*absent.py"),
        (f"{FUNCTIONS}/broken.py:f", "running .*broken.py failed: RuntimeError: no database here"),
        (f"{MINE}:LIMIT", "LIMIT is int, not a function"),
        (f"{MINE}:not_async", "must be `async def`"),
        (f"{MINE}:two", r"called with 1 argument\(s\), but its signature is"),
        (f"{MINE}:", "write 'pkg.module:name' or 'PATH.py:name'"),
        (":f", "write 'pkg.module:name' or 'PATH.py:name'"),
    ],
)
def test_a_wrong_path_is_one_error_that_names_it_and_what_to_do(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_generate(path)
    assert path in str(caught.value)


def test_a_file_that_fails_to_run_fails_again_the_same_way() -> None:
    for _ in range(2):
        with pytest.raises(ConfigError, match="no database here"):
            resolve(f"{FUNCTIONS}/broken.py:f", "tool")


def test_an_import_error_inside_a_module_is_not_a_missing_module(tmp_path: Path) -> None:
    (tmp_path / "needs.py").write_text("import surely_not_installed\n")
    with pytest.raises(ConfigError, match="surely_not_installed"):
        resolve(f"{tmp_path / 'needs.py'}:f", "tool")


def test_a_module_that_exits_is_an_error_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match="SystemExit: 3"):
        resolve(f"{tmp_path / 'exits.py'}:f", "tool")


def test_async_is_seen_through_partials_and_objects() -> None:
    class Callable:
        async def __call__(self) -> None: ...

    assert is_async(functools.partial(multi_turn))
    assert is_async(Callable())
    assert not is_async(describe)


def test_a_sync_only_contract_refuses_async() -> None:
    with pytest.raises(ConfigError, match="must not be `async def`"):
        resolve(f"{MINE}:generate", "filter", kind="sync")


def test_an_error_is_described_whatever_its_str_does() -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe(Rude()) == "Rude: (its message cannot be shown)"
    assert describe(ValueError()) == "ValueError"
    assert len(describe(ValueError("x" * 10**6))) < 600
