"""The closed table of a verifier: what its own configuration adds, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollstream.errors import ConfigError
from worker.isolation.table import BUILT_IN, table_of


def test_table_has_the_built_in_jobs_and_the_functions_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def judge(payload):\n    return 1.0\n")
    table = table_of(["code", f"{file}:judge"])
    assert set(table) == {*BUILT_IN, f"{file}:judge"}
    assert table[f"{file}:judge"].run({}) == 1.0
    assert not table[f"{file}:judge"].shares_process


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mathverify", "unknown job in reward.isolated 'mathverify'; did you mean 'math_verify'?"),
        ("os", "unknown job in reward.isolated 'os'"),
        ("no_such_module:f", "there is no module no_such_module"),
    ],
)
def test_table_refuses_what_it_cannot_run(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        table_of([name])
    assert says in str(caught.value)
