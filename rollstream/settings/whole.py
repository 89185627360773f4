"""The whole configuration, and what follows from several of its tables.

Owns what an environment inherits and which URL Redis has. Never reads the file, the environment or
the command line: `rollstream.config` does. Invariant: a `Settings` is frozen, complete and checked.
"""

from __future__ import annotations

from pydantic import Field

from rollstream.errors import ConfigError
from rollstream.settings.models import (
    EngineTable,
    ModelTable,
    SamplingTable,
)
from rollstream.settings.rollouts import (
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
from rollstream.settings.table import Table
from rollstream.urls import redis_url_problem, with_sentinels


class Settings(Table):
    """The whole configuration."""

    run: RunTable = RunTable()
    redis: RedisTable = RedisTable()
    model: ModelTable = ModelTable()
    engine: EngineTable = EngineTable()
    sampling: SamplingTable = SamplingTable()
    env: dict[str, EnvTable] = Field(default_factory=dict)
    producer: ProducerTable = ProducerTable()
    worker: WorkerTable = WorkerTable()
    aggregator: AggregatorTable = AggregatorTable()
    weights: WeightsTable = WeightsTable()
    reward: RewardTable = RewardTable()
    rq: RqTable = RqTable()
    verifier: VerifierTable = VerifierTable()
    tool: dict[str, ToolTable] = Field(default_factory=dict)
    mcp: dict[str, McpTable] = Field(default_factory=dict)
    telemetry: TelemetryTable = TelemetryTable()
    gateway: GatewayTable = GatewayTable()
    exporter: ExporterTable = ExporterTable()
    debug: DebugTable = DebugTable()

    def envs(self) -> dict[str, EnvTable]:
        """Return every environment; what one does not set itself is the flat key's value.

        Without `env` tables the flat keys are the one environment `default`.
        """
        flat = EnvTable(
            n_samples_per_prompt=self.producer.n_samples_per_prompt,
            generate=self.worker.generate,
            agent=self.worker.agent,
            max_turns=self.worker.max_turns,
            tools=self.worker.tools,
            reward=self.reward,
            filters=self.aggregator.filters,
            execute_last_turn=self.worker.execute_last_turn,
            environment=self.worker.environment,
            on_truncated=self.aggregator.on_truncated,
        )
        if not self.env:
            return {"default": flat}
        return {name: _over(flat, table) for name, table in self.env.items()}

    def mixed_envs(self) -> dict[str, EnvTable]:
        """Return the environments with a source of their own, whose groups are mixed."""
        return {name: table for name, table in self.env.items() if table.source}

    def redis_url(self) -> str:
        """Return the URL, read from `url_file` where one is given, with the sentinels.

        Raises:
            ConfigError: the file cannot be read, or holds no URL; or `ca` is no file.
        """
        ca = self.redis.ca
        if ca is not None and not ca.is_file():
            raise ConfigError(f"redis.ca {ca}: there is no such file")
        path = self.redis.url_file
        if path is None:
            return _watched(self.redis.url.get_secret_value(), self.redis.sentinel)
        try:
            url = path.read_text(encoding="utf-8-sig").strip()
        except (OSError, ValueError) as error:  # not UTF-8, or a name that cannot be one
            raise ConfigError(f"redis.url_file {path} cannot be read: {error}") from None
        if problem := redis_url_problem(url):
            raise ConfigError(f"redis.url_file {path} holds no URL of Redis: expected {problem}")
        return _watched(url, self.redis.sentinel)


def _watched(url: str, sentinels: str) -> str:
    """Return the URL with `redis.sentinel` in place of its host, where that is set."""
    if not sentinels:
        return url
    whole = with_sentinels(url, sentinels)
    if not url.startswith(("redis://", "rediss://")) or redis_url_problem(whole):
        raise ConfigError(
            f"redis.sentinel = {sentinels!r}: expected host:port,host:port/master, and a "
            "redis.url that begins with redis:// or rediss://"
        )
    return whole


def _over(flat: EnvTable, table: EnvTable) -> EnvTable:
    """Return `flat` with what `table` itself was given."""
    given = {name: getattr(table, name) for name in table.model_fields_set}
    if "reward" in given:
        own = {name: getattr(table.reward, name) for name in table.reward.model_fields_set}
        given["reward"] = flat.reward.model_copy(update=own)
    return flat.model_copy(update=given)
