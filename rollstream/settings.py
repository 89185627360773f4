"""All configuration: every table, key, default and check, read once at start-up.

Owns the tables and where a value came from. Never imported by the client library: only the apps
and `rollstream.cli` need pydantic. Invariant: a `Settings` is frozen, complete and checked; an
unknown key is an error that names the nearest one.

Precedence, lowest first: defaults, `rollstream.toml`, `ROLLSTREAM_<TABLE>__<KEY>`,
`--table.key value`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator


class Table(BaseModel):
    """A table of the configuration: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RunTable(Table):
    """Which run this process belongs to."""

    name: str = Field("demo", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    seed: int = 0
    """Seed of the run; every call's sampling seed is a hash of it."""


class RedisTable(Table):
    """Where Redis or Valkey is."""

    url: SecretStr = SecretStr("redis://127.0.0.1:6379")
    url_file: Path | None = None
    """A file that holds the URL (a mounted secret); wins over `url`."""
    ca: Path | None = None
    """CA certificate for `rediss://`."""
    connect_timeout_s: float = Field(5.0, gt=0)


class ModelTable(Table):
    """Tokens: which vocabulary, which chat format, how much context."""

    tokenizer: str = ""
    """A `tokenizer.json`, or the folder that holds one."""
    renderer: str = "qwen3"
    max_context_tokens: int = Field(32768, ge=1)


class EngineTable(Table):
    """The inference engines."""

    kind: Literal["sglang", "sim"] = "sglang"
    """`sim` is the simulated engine, which speaks SGLang's protocol."""
    urls: tuple[str, ...] = ()
    request_timeout_s: float = Field(600.0, gt=0)
    connect_timeout_s: float = Field(5.0, gt=0)
    max_retries: int = Field(4, ge=0)
    """How often one call is tried again, elsewhere where there is another engine."""
    retry_backoff_s: float = Field(0.2, gt=0)
    """First wait before a retry; doubles with jitter up to `retry_backoff_max_s`."""
    retry_backoff_max_s: float = Field(5.0, gt=0)
    abort_wait_s: float = Field(2.0, ge=0)
    """How long a retry waits for the partial reply of the call that it aborted."""
    probe_interval_s: float = Field(2.0, gt=0)

    @field_validator("urls", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = [url for url in value.split(",") if url]
        return tuple(url.rstrip("/") for url in value)


class SamplingTable(Table):
    """The distribution that the engines sample from."""

    temperature: float = Field(1.0, ge=0)
    max_new_tokens: int = Field(1024, ge=1)
    """Cap of one reply (the per-turn cap)."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Cap of everything after the first prompt, sampled or observed."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = -1
    min_p: float = Field(0.0, ge=0, le=1)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    allow_off_distribution: bool = False
    """Permit parameters under which log-probs no longer are those of the sampled distribution."""


class RewardTable(Table):
    """How samples are scored."""

    kind: str = "math"
    """A built-in name, `none` (the trainer scores), or a dotted path."""
    key: str | None = None
    """Which entry of a reward dictionary is the reward."""
    isolated: tuple[str, ...] = ("math_verify",)
    """Rewards that run in a process of their own, through the verifier."""
    timeout_s: float = Field(30.0, gt=0)
    isolated_share: float = Field(0.0, ge=0, le=1)
    """Share of samples that `math_verify` scores, isolated, in place of `kind`."""


class EnvTable(Table):
    """A named mix of generate function, tools, reward and filters; rows name theirs."""

    n_samples_per_prompt: int = Field(8, ge=1, le=4096)
    generate: str = "multi_turn"
    max_turns: int = Field(8, ge=1)
    tools: tuple[str, ...] = ()
    reward: RewardTable = RewardTable()
    filters: tuple[str, ...] = ()
    sampling: dict[str, Any] = Field(default_factory=dict)
    execute_last_turn: bool = False
    """Run the calls of the last permitted turn, as the reference does (conformance 20)."""


class ProducerTable(Table):
    """Where prompts come from and how many may be in flight."""

    source: str = ""
    """`jsonl:PATH` or `reasoning_gym:NAME?size=…&seed=…`."""
    n_samples_per_prompt: int = Field(8, ge=1, le=4096)
    epochs: int = Field(1, ge=1)
    shuffle_seed: int | None = None
    """None keeps the order of the file."""
    capacity_groups: int = Field(512, ge=1)
    """How many groups may be live at once: the back-pressure."""
    on_bad_row: Literal["error", "skip"] = "error"
    keys: dict[str, str] = Field(default_factory=dict)
    """Renamed columns: {our name: the file's name}."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    progress: bool = True


class WorkerTable(Table):
    """One worker process."""

    concurrency: int = Field(256, ge=1, le=8192)
    generate: str = "multi_turn"
    max_turns: int = Field(8, ge=1)
    tools: tuple[str, ...] = ()
    tool_timeout_s: float = Field(30.0, gt=0)
    tool_output_chars: int = Field(16384, ge=64)
    sample_timeout_s: float = Field(3600.0, gt=0)
    max_seq_len: int | None = Field(None, ge=1)
    execute_last_turn: bool = False
    lease_s: float = Field(15.0, ge=0.5)
    max_attempts: int = Field(3, ge=1)
    max_crashes: int = Field(4, ge=1)
    retry_delay_s: float = Field(0.5, ge=0)
    """First wait before a failed member is leased again; doubles per attempt, with jitter."""
    max_body_bytes: int = Field(16 << 20, ge=1024)
    drain_s: float = Field(20.0, ge=0)
    """How long SIGTERM waits for samples in flight before it gives them back."""
    fail_after_groups: int = Field(20, ge=1)
    """Refused groups in a row, without one success, that end the run as failed."""
    role: Literal["all", "rollout", "aggregator"] = "all"


class AggregatorTable(Table):
    """When a full group is delivered."""

    filters: tuple[str, ...] = ("no_aborted", "reward_nonzero_std")
    min_samples: int | None = Field(None, ge=1)
    """Usable members that a group needs; None is all n."""
    group_timeout_s: float = Field(0.0, ge=0)
    """Deadline of a group from its first lease; 0 is none."""
    on_filter_error: Literal["drop", "stop"] = "drop"
    std_threshold: float = Field(1e-6, ge=0)


class WeightsTable(Table):
    """How old a sample may be."""

    max_staleness: int = Field(-1, ge=-1)
    """Versions; -1 is unbounded."""


class RqTable(Table):
    """Where the isolated rewards' jobs go; empty is the run's Redis."""

    url: SecretStr | None = None


class TelemetryTable(Table):
    """Metrics and logs."""

    metrics_host: str = "0.0.0.0"
    metrics_port: int = Field(9400, ge=0, le=65535)
    """A port in use takes the next free one and says so; 0 takes any."""
    log_format: Literal["json", "console"] = "json"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class DebugTable(Table):
    """What is recorded for people."""

    messages: bool = False
    dump_dir: Path | None = None
    wire_dir: Path | None = None
    """Every engine request and reply is kept here byte for byte, for the auditor."""


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
    telemetry: TelemetryTable = TelemetryTable()
    debug: DebugTable = DebugTable()

    def envs(self) -> dict[str, EnvTable]:
        """Return every environment; the flat keys are `default` where no table is given."""
        if self.env:
            return dict(self.env)
        return {
            "default": EnvTable(
                n_samples_per_prompt=self.producer.n_samples_per_prompt,
                generate=self.worker.generate,
                max_turns=self.worker.max_turns,
                tools=self.worker.tools,
                reward=self.reward,
                filters=self.aggregator.filters,
                execute_last_turn=self.worker.execute_last_turn,
            )
        }

    def redis_url(self) -> str:
        """Return the URL, read from `url_file` where one is given."""
        if self.redis.url_file is not None:
            return self.redis.url_file.read_text().strip()
        return self.redis.url.get_secret_value()
