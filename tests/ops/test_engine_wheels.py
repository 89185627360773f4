"""The engines' wheels still say what our contract tests hold requests and replies against.

Reads the wheels by ranges: about 5 MB of 375, through pip's own package index.
"""

from __future__ import annotations

import pytest

from tests.contract import engine_fields, wheels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("name", "wheel"), [("sglang", engine_fields.SGLANG), ("vllm", engine_fields.VLLM)]
)
def test_the_kept_fields_are_those_of_the_wheel(name: str, wheel: str) -> None:
    try:
        found, num_bytes = engine_fields.read_wheel(wheel)
    except wheels.NoWheelError as error:
        pytest.fail(str(error), pytrace=False)
    assert found == engine_fields.load()[name], (
        "look at what changed, then run python -m tests.contract.engine_fields"
    )
    assert num_bytes < 20e6, "only a few members are read, not the wheel"
