"""What users may import, and what importing it may bring along."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import rollstream

PUBLIC = """
AgentFault AsyncGroupStream Batch Call CapacityTooSmall ConfigError ConsumerTaken ContractError Drop
DropReason EngineFault EnvFault EvalResult FinishedGroup GroupStream GroupView Keep MemberReason
MergeFault Missing PauseNotConfirmed ProducerGone PromptGroup RewardFault RollstreamError
RolloutFault RunFailed RunLost RunMismatch Sample Span Status StopReason StreamError StreamStalled
ToolFault TrainArrays WeightUpdate WireError WireTooNew __version__
""".split()

THIRD_PARTY_OF_THE_CLIENT = {"redis", "hiredis", "msgpack", "numpy", "rollstream"}
"""Everything a trainer's process gets by the client library, beside the standard library."""
REDIS_OWN = set(
    "cython_runtime jwt _cffi_backend cryptography OpenSSL requests async_timeout opentelemetry "
    "xxhash".split()
)
"""What redis-py and the compiled packages import by themselves where it is installed."""

IMPORT_ALL = """
import json, sys
before = set(sys.modules)
import rollstream
early = sorted({m.partition(".")[0] for m in set(sys.modules) - before})
for name in rollstream.__all__:
    getattr(rollstream, name)
late = sorted({m.partition(".")[0] for m in set(sys.modules) - before})
print(json.dumps([early, late, sorted(sys.stdlib_module_names)]))
"""


def imported() -> tuple[set[str], set[str], set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True, timeout=80
    )
    early, late, stdlib = json.loads(done.stdout)
    return set(early), set(late), set(stdlib)


def test_rollstream_has_exactly_its_public_names() -> None:
    assert sorted(rollstream.__all__) == sorted(PUBLIC)
    assert dir(rollstream) == sorted(PUBLIC)
    for name in PUBLIC:
        value = getattr(rollstream, name)
        if name != "__version__":
            assert value.__name__ == name


def test_rollstream_says_so_where_a_name_does_not_exist() -> None:
    missing = "Batches"
    with pytest.raises(AttributeError, match="no attribute 'Batches'"):
        getattr(rollstream, missing)


def test_import_rollstream_brings_nothing_before_a_name_is_used() -> None:
    early, _, stdlib = imported()
    assert early - stdlib == {"rollstream"}


def test_every_public_name_needs_redis_msgpack_and_numpy_only() -> None:
    _, late, stdlib = imported()
    late = {name for name in late if not name.startswith("_cython_")}
    assert late - stdlib - REDIS_OWN <= THIRD_PARTY_OF_THE_CLIENT
    assert {"redis", "msgpack", "numpy"} <= late
