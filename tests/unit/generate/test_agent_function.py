"""An agent's function is checked before the first sample runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.errors import ConfigError
from worker.generate.agent_function import EXTRA, resolve_agent

HEAD = "async def run(base_url, prompt, request_kwargs, metadata"
OBJECT = """
class Agent:
    async def __call__(self, base_url, prompt, request_kwargs, metadata): ...
run = Agent()
"""


def written(tmp_path: Path, text: str, name: str = "run") -> str:
    path = tmp_path / "an_agent.py"
    path.write_text(text)
    return f"{path}:{name}"


@pytest.mark.parametrize(
    ("text", "extra"),
    [
        (f"{HEAD}): ...", ()),
        (f"{HEAD}, **kw): ...", EXTRA),
        (f"{HEAD}, *, label=None, api_key): ...", ("label", "api_key")),
        ("def run(*, base_url, prompt, request_kwargs, metadata, tools): ...", ("tools",)),
        ("def run(**kw): ...", EXTRA),
        (OBJECT, ()),
    ],
)
def test_an_agent_gets_what_it_takes(tmp_path: Path, text: str, extra: tuple[str, ...]) -> None:
    assert resolve_agent(written(tmp_path, text)).extra == extra


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("async def run(base_url, prompt): ...", "request_kwargs"),
        ("async def run(given): ...", "base_url, prompt, request_kwargs, metadata by name"),
        (f"{HEAD}, mine): ...", "'mine'"),
        ("async def run(base_url, prompt, request_kwargs, metadata, /): ...", "positional"),
        ("run = 3", "is int, not a function"),
        (f"{HEAD}): ...\nrun.abort = 3", "its abort is int, not a function"),
        (f"{HEAD}): ...\nasync def abort(session): ...", "its abort"),
        ("import no_such_module_here", "importing"),
    ],
)
def test_what_is_wrong_with_an_agent_is_one_error_at_the_start(
    tmp_path: Path, text: str, part: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        resolve_agent(path)
    assert part in str(caught.value) or "running" in str(caught.value)
    assert path in str(caught.value)


def test_abort_is_the_function_s_own_else_the_one_beside_it(tmp_path: Path) -> None:
    beside = f"{HEAD}): ...\nasync def abort(base_url, metadata, **kw): ..."
    agent = resolve_agent(written(tmp_path, beside))
    assert agent.abort is not None
    assert agent.abort.__qualname__ == "abort"

    own = tmp_path / "own"
    own.mkdir()
    text = f"{beside}\nasync def mine(base_url, metadata): ...\nrun.abort = mine"
    agent = resolve_agent(written(own, text))
    assert agent.abort is not None
    assert agent.abort.__qualname__ == "mine"


def test_an_abort_that_the_module_only_imports_is_somebody_else_s(tmp_path: Path) -> None:
    agent = resolve_agent(written(tmp_path, f"from os import abort\n{HEAD}): ..."))
    assert agent.abort is None
