"""Parts of the hf engine that need no PyTorch."""

from __future__ import annotations

import random
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from rollstream.errors import ConfigError
from tests.toy import toy_inner
from worker.engines.hf.folder import eos_ids
from worker.engines.hf.params import Params
from worker.engines.hf.prefixes import Kept, PrefixStore
from worker.engines.hf.task import Task


def kept(ids: list[int], salt: str = "v0", num_bytes: int = 1, whole: bool = False) -> Kept:
    return Kept(salt, np.asarray(ids, dtype=np.int64), None, num_bytes, whole, None)


def test_longest_shared_prefix_under_the_same_salt_is_found() -> None:
    store = PrefixStore(100)
    for entry in (kept([1, 2]), kept([1, 2, 3, 9]), kept([1, 2, 3, 4, 5], salt="v1")):
        store.keep(entry)
    found = store.best([1, 2, 3, 4, 5, 6], "v0", 5, experts=False)
    assert found is not None
    assert (found[0].ids.tolist(), found[1]) == ([1, 2, 3, 9], 3)
    assert store.best([1, 2, 3, 4], "v2", 3, experts=False) is None
    assert store.best([7], "v0", 0, experts=False) is None
    assert store.best([1, 2, 3], "v0", 2, experts=True) is None


def test_entry_that_cannot_be_cut_is_used_whole_and_once() -> None:
    store = PrefixStore(100)
    store.keep(kept([1, 2, 3], whole=True))
    assert store.best([1, 2, 9, 9], "v0", 3, experts=False) is None
    assert store.best([1, 2, 3], "v0", 2, experts=False) is None
    found = store.best([1, 2, 3, 4], "v0", 3, experts=False)
    assert found is not None
    assert found[1] == 3
    assert store.best([1, 2, 3, 4], "v0", 3, experts=False) is None
    assert store.num_bytes == 0


def test_bytes_stay_within_the_limit_and_the_least_recently_used_goes_first() -> None:
    store, dice = PrefixStore(50), random.Random(1)
    for number in range(400):
        store.keep(kept([number % 7, number], num_bytes=dice.randrange(1, 70)))
        assert store.num_bytes <= 50
    store = PrefixStore(2)
    store.keep(kept([1, 1]))
    store.keep(kept([2, 2]))
    assert store.best([1, 1, 1], "v0", 2, experts=False) is not None
    store.keep(kept([3, 3]))
    assert store.best([2, 2, 2], "v0", 2, experts=False) is None
    assert store.best([1, 1, 1], "v0", 2, experts=False) is not None
    assert len(PrefixStore(0)) == 0
    assert not PrefixStore(0).is_on


def test_entry_takes_the_place_of_those_that_it_extends() -> None:
    store = PrefixStore(100)
    store.keep(kept([1, 2]))
    store.keep(kept([1, 2], salt="v1"))
    store.keep(kept([1, 2, 3]))
    assert (len(store), store.num_bytes) == (2, 2)


@pytest.mark.parametrize("stop", ["llo", "hello", "€", "\n<think>", "d\n"])
def test_stop_string_is_seen_at_the_token_that_completes_it(stop: str) -> None:
    text = f"Oh, he said {stop} and went"
    inner = toy_inner()
    ids = inner.encode(text, add_special_tokens=False).ids
    task = Task("r", [1], Params(stop=(stop,), max_new_tokens=99, no_stop_trim=True))
    for token in ids:
        task.take(token, -1.0, frozenset(), inner)
        if task.finish is not None:
            break
    assert task.finish == {"type": "stop", "matched": stop}
    said = inner.decode(task.output, skip_special_tokens=False)
    before = inner.decode(task.output[:-1], skip_special_tokens=False)
    assert stop in said
    assert stop not in before


def test_ends_are_those_of_both_files_and_bad_files_are_named(tmp_path: Path) -> None:
    assert eos_ids(tmp_path, None) == frozenset()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert eos_ids(tmp_path, 2) == {2, 5, 6}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not JSON"):
        eos_ids(tmp_path, 2)


def test_pytorch_is_in_the_extra_and_its_own_file_and_in_no_lock() -> None:
    root = Path(__file__).parents[3]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    lines = (root / "requirements-hf.txt").read_text().splitlines()
    assert sorted(extras["hf"]) == sorted(line for line in lines if not line.startswith("#"))
    for lock in ("requirements.lock", "ops/requirements.lock"):
        assert not re.search(r"^(torch|nvidia-\S+)==", (root / lock).read_text(), re.MULTILINE)
