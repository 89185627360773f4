"""Which keys a script really touches, held against what its header names."""

from __future__ import annotations

import re

import pytest

from rollstream.queue.keys import prefix, run_of
from rollstream.queue.scripts import Script, load_scripts, make_script
from tests.queue_bench import clocked_scripts, fake_bench
from tests.unit.queue.test_repeats import CASES

RECORDING = """local function call(command, key, ...)
  if key then redis.call('SADD', 'touched:%s', key) end
  return redis.call(command, key, ...)
end
"""


def recording_scripts() -> dict[str, Script]:
    """Return the scripts, each of which writes down the keys of all its commands."""
    plain = "local call = redis.call\n"
    return {
        name: make_script(name, script.source.replace(plain, RECORDING % name))
        for name, script in clocked_scripts().items()
    }


@pytest.mark.parametrize("case", CASES)
def test_scripts_touch_no_key_that_their_headers_do_not_name(case: str) -> None:
    bench = fake_bench(recording_scripts())
    bench.call(CASES[case].prepare(bench))
    bench.sweep()
    checked = 0
    for name, script in load_scripts().items():
        touched = {raw.decode() for raw in bench.client.smembers(f"touched:{name}")}
        touched -= {f"now:{bench.key}"}
        found = {re.sub(r":.*", ":<gid>", key.removeprefix(bench.key)) for key in touched}
        assert all(key.startswith(bench.key) for key in touched)
        assert found <= {key for key, _ in script.header.keys}, name
        checked += len(found)
    assert checked > 0


@pytest.mark.parametrize("case", CASES)
def test_keys_have_the_types_that_the_headers_name(case: str) -> None:
    bench = fake_bench()
    bench.call(CASES[case].prepare(bench))
    types = {name: kind for script in load_scripts().values() for name, kind in script.header.keys}
    for name in bench.key_names():
        kind = bench.client.type(bench.key + name).decode().upper()
        assert types[re.sub(r":.*", ":<gid>", name)] == kind


def test_headers_agree_on_the_type_of_every_key() -> None:
    pairs = {pair for script in load_scripts().values() for pair in script.header.keys}
    assert len(pairs) == len({name for name, _ in pairs})


def test_every_key_of_a_run_is_in_one_cluster_slot_and_names_its_run() -> None:
    assert prefix("demo") == "rs:{demo}:"
    assert run_of(prefix("demo") + "g:17") == "demo"
