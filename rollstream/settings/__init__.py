"""All configuration: every table, key, default and check, read once at start-up.

Owns the tables. Never imported by the client library: only the apps and `rollstream.cli` need
pydantic. Invariant: a `Settings` is frozen, complete and checked; an unknown key is an error that
names the nearest one.

Precedence, lowest first: defaults, `rollstream.toml`, `ROLLSTREAM_<TABLE>__<KEY>`,
`--table.key value`.
"""

from rollstream.settings.models import (
    EngineTable,
    ModelTable,
    SamplingTable,
)
from rollstream.settings.rollouts import (
    NO_REWARD,
    AggregatorTable,
    EnvTable,
    ProducerTable,
    RewardTable,
    WeightsTable,
    WorkerTable,
)
from rollstream.settings.services import (
    DebugTable,
    ExporterTable,
    GatewayTable,
    McpTable,
    RedisTable,
    RqTable,
    RunTable,
    TelemetryTable,
    ToolTable,
    VerifierTable,
)
from rollstream.settings.whole import Settings

__all__ = [
    "NO_REWARD",
    "AggregatorTable",
    "DebugTable",
    "EngineTable",
    "EnvTable",
    "ExporterTable",
    "GatewayTable",
    "McpTable",
    "ModelTable",
    "ProducerTable",
    "RedisTable",
    "RewardTable",
    "RqTable",
    "RunTable",
    "SamplingTable",
    "Settings",
    "TelemetryTable",
    "ToolTable",
    "VerifierTable",
    "WeightsTable",
    "WorkerTable",
]
