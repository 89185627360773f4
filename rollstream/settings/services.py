"""The tables about what is around rollouts: the run, Redis, verifiers, tools, servers, telemetry.

Owns these keys, their defaults and checks. Never reads a value from anywhere. Invariant: whatever
holds a password is a `SecretStr`, or the path of a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr, field_validator

from rollstream.settings.table import Table, checked_url
from rollstream.urls import engine_url_problem


class RunTable(Table):
    """Which run this process belongs to."""

    name: str = Field("demo", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Name of the run: every key in Redis lies under it."""
    seed: int = 0
    """Seed of the run; every call's sampling seed is a hash of it."""


class RedisTable(Table):
    """Where Redis or Valkey is."""

    url: SecretStr = SecretStr("redis://127.0.0.1:6379")
    """`redis://`, `rediss://` or `unix://`, with user and password where there are any; or
    `redis+sentinel://host:port,host:port/master`. Of a cluster: any of its nodes."""
    url_file: Path | None = None
    """A file that holds the URL (a mounted secret); wins over `url`."""
    ca: Path | None = None
    """CA certificate for `rediss://`."""
    sentinel: str = ""
    """`host:port,host:port/master`: sentinels, and the name they know the master by, in place of
    the host of `url` (whose user, password and database stay the master's)."""
    connect_timeout_s: float = Field(5.0, gt=0)
    """How long one connection attempt may take."""

    @field_validator("url")
    @classmethod
    def _check(cls, value: SecretStr) -> SecretStr:
        return checked_url(value)


class RqTable(Table):
    """Where the isolated rewards' jobs go; empty is the run's Redis."""

    url: SecretStr | None = None
    """Redis of the jobs of isolated rewards; none is `redis.url`."""

    @field_validator("url")
    @classmethod
    def _check(cls, value: SecretStr | None) -> SecretStr | None:
        return None if value is None else checked_url(value)


class VerifierTable(Table):
    """The verifier: processes that run what may hang or crash."""

    processes: int = Field(1, ge=1, le=256)
    """Jobs that one verifier runs at once when there is little to do."""
    max_processes: int = Field(0, ge=0, le=256)
    """How many it grows to while jobs wait; 0 is the number of cores, at least `processes`."""
    idle_s: float = Field(30.0, gt=0)
    """After how long in which they were not all needed one of them ends again."""
    memory_mb: int = Field(1024, ge=64)
    """Memory that the process of jobs takes over what the verifier has, and that each program
    takes."""
    max_programs: int = Field(32, ge=1)
    """Processes and threads that one job may have."""
    file_mb: int = Field(32, ge=1)
    """Largest file that a job may write."""
    output_chars: int = Field(16384, ge=256)
    """Of what a program prints, so much is read; the rest is thrown away."""
    network: bool = False
    """Let programs use the network; off, it is taken away where the kernel allows that."""


class ToolTable(Table):
    """Settings of one tool, by its name in `tools`; what is not set is the worker's."""

    timeout_s: float | None = Field(None, gt=0)
    """How long one call may take."""
    output_chars: int | None = Field(None, ge=64)
    """Longer results are cut."""
    output_tokens: int | None = Field(None, ge=16)
    """The same in tokens of the model."""
    concurrency: int | None = Field(None, ge=1)
    """Calls that run at once in one process."""


class McpTable(Table):
    """One MCP server; `mcp:NAME` in `tools` is all of its tools, `mcp:NAME/TOOL` one."""

    url: str = ""
    """Of its streamable HTTP endpoint."""
    token_file: Path | None = None
    """A file with the bearer token (a mounted secret); read again for every new session."""
    connections: int = Field(4, ge=1, le=256)
    """Sessions with it, of one process; any number of calls run on each at once."""
    connect_timeout_s: float = Field(10.0, gt=0)
    """How long a session may take to begin, and how long a call waits for a server that is away."""

    @field_validator("url")
    @classmethod
    def _check(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("a URL that starts with http:// or https://")
        if problem := engine_url_problem(value.partition("?")[0]):
            raise ValueError(problem)
        return value


class TelemetryTable(Table):
    """Metrics and logs."""

    metrics_host: str = "0.0.0.0"
    """Address that `/metrics`, `/healthz` and `/readyz` listen on."""
    metrics_port: int = Field(9400, ge=0, le=65535)
    """A port in use takes the next free one and says so; 0 takes any."""
    heartbeat_file: Path | None = None
    """Producer and verifier have no HTTP server: they renew the time of this file every second
    while they work, and a health check looks at its age."""
    log_format: Literal["json", "console"] = "json"
    """`json` for machines, `console` for a person."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is written."""
    rescore_fraction: float = Field(0.0, ge=0, le=1)
    """Share of finished samples whose log-probs are held against a prefill of the same engines, in
    the background: `rollout_logprob_difference`."""


class ExporterTable(Table):
    """The exporter: what is measured of a run as a whole, once, from its state in Redis."""

    host: str = "0.0.0.0"
    """Address that `/metrics`, `/healthz` and `/readyz` listen on."""
    port: int = Field(9401, ge=0, le=65535)
    """A port in use takes the next free one and says so; 0 takes any."""
    interval_s: float = Field(2.0, ge=0.1, le=60)
    """How often the run is read; a scrape is answered with what was read last."""


class GatewayTable(Table):
    """The chat API that agents call (`generate = "agent"`), served by every worker."""

    host: str = "127.0.0.1"
    """Address that it listens on; `0.0.0.0` for agents on other machines."""
    port: int = Field(9500, ge=0, le=65535)
    """A port in use takes the next free one and says so; 0 takes any."""
    public_url: str = ""
    """What agents elsewhere call this worker by (`http://10.0.0.7:{port}`); empty is host and port.
    `{port}` becomes the port that was taken."""
    session: Literal["linear", "tree"] = "linear"
    """`linear`: a sample is one line of calls. `tree`: sub-agents and branches are leaves, and the
    result is a list of samples."""
    on_divergence: Literal["reject", "fork", "keep_prefix"] = "keep_prefix"
    """With `linear`: what becomes of an agent that rewrites its history by more than its last turn.
    `keep_prefix` trains the line of its newest call, `fork` every line, `reject` refuses the
    request."""
    picker: str = "drop_retries"
    """With `tree`: which leaves become samples: `drop_retries`, `all`, or a function of yours."""
    matcher: str = "rendered"
    """When a message that comes back is the one that is known: `rendered`, `strict`,
    `loose_tool_call`, `role_content_only`, or a function of yours."""
    agent_timeout_s: float | None = Field(None, gt=0)
    """How long one agent may run, pauses not counted; none is `worker.sample_timeout_s`, which also
    bounds it."""
    max_turns: int = Field(1024, ge=1, le=1024)
    """Calls of one line of an agent; fewer where `max_turns` of its environment (or
    `worker.max_turns`) is given and is less."""
    max_session_tokens: int = Field(4 << 20, ge=1)
    """Tokens that one session may hold, of all its lines (12 bytes each): prompts that begin anew
    are held beside the earlier ones. The request behind that is refused."""
    max_in_flight: int = Field(32, ge=1)
    """Requests of one agent at once; more are told to try again."""
    max_body_bytes: int = Field(8 << 20, ge=1024)
    """Largest request; refused before any of it is read as JSON."""
    keepalive_s: float = Field(10.0, gt=0)
    """How often a stream without news says that it is alive."""

    @field_validator("public_url")
    @classmethod
    def _check(cls, value: str) -> str:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("a URL that starts with http:// or https://, or nothing")
        return value.rstrip("/")


class DebugTable(Table):
    """What is recorded for people."""

    messages: bool = False
    """Keep the conversation of every sample in its `metadata["messages"]`, a megabyte at most."""
    wire_dir: Path | None = None
    """Every engine request and reply is kept here byte for byte, for the auditor."""
