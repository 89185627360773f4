"""All configuration: every table, key, default and check, read once at start-up.

Owns the tables and where a value came from. Never imported by the client library: only the apps
and `rollstream.cli` need pydantic. Invariant: a `Settings` is frozen, complete and checked; an
unknown key is an error that names the nearest one.

Precedence, lowest first: defaults, `rollstream.toml`, `ROLLSTREAM_<TABLE>__<KEY>`,
`--table.key value`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationInfo, field_validator

from rollstream.errors import ConfigError
from rollstream.parameters import PARAMETERS, problem_of
from rollstream.urls import (
    NO_NAME_WITH_TLS,
    engine_url_problem,
    is_name_with_tls,
    redis_url_problem,
    with_sentinels,
)

if TYPE_CHECKING:
    from rollstream.group import EnvRule


class Table(BaseModel):
    """A table of the configuration: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _checked_url(value: SecretStr) -> SecretStr:
    if problem := redis_url_problem(value.get_secret_value()):
        raise ValueError(problem)
    return value


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
        return _checked_url(value)


class ModelTable(Table):
    """Tokens: which vocabulary, which chat format, how much context."""

    tokenizer: str = ""
    """A `tokenizer.json`, the folder that holds one, or a hub id `org/name[@revision]`. A path that
    exists wins; only for a hub id that the local cache lacks is the hub asked."""
    renderer: str = "auto"
    """The family of the chat format (docs/tokens.md), `template` for the chat template in the
    tokenizer's folder, or `auto` for a model whose exact hub id is known."""
    chat_template: str = ""
    """With `template`: path of another chat template than the folder's."""
    boundaries: str = "auto"
    """With `template`: how a turn ends, a row of the table in docs/tokens.md, or `derived`."""
    tool_parser: str = ""
    """With `template`: how calls are spelled; empty leaves them text."""
    reasoning_parser: str = ""
    """With `template`: `think`, `none`, or empty for the vocabulary's own markers."""
    template_date: str = ""
    """With `template`: what today is, as YYYY-MM-DD, for the whole run."""
    template_names: dict[str, Any] = Field(default_factory=dict)
    """With `template`: what else the template reads, as `{"enable_thinking": false}`."""
    max_context_tokens: int = Field(32768, ge=1)
    """What the engine's model takes, prompt and response together."""


class EngineTable(Table):
    """The inference engines."""

    kind: Literal["sglang", "vllm", "hf", "sim"] = "sglang"
    """The protocol that the engines speak. The engine over transformers and the simulated one speak
    SGLang's, so `hf` and `sim` do the same as `sglang`, and say what the engines are."""
    urls: tuple[str, ...] = ()
    """Root URLs of the engines. `dns+http://host:port` is every address that the name has, and
    `router+http://host:port` every worker that a router lists; both are asked again and again.
    `dns+https` is refused: engines are called by address, which no certificate names. A trainer's
    `set_engines` wins over this."""
    discover_interval_s: float = Field(10.0, gt=0)
    """How often a name is resolved, and a router asked for its workers."""
    require_version: bool = True
    """An engine that is known to have older weights than the run, or to be between two, takes no
    calls. Engines that never name their weights are believed to have the run's."""
    vllm_route: Literal["generate", "completions"] = "generate"
    """With `vllm`: token-in token-out (`/inference/v1/generate`), or `/v1/completions` for servers
    that lack it."""
    model: str = ""
    """With `vllm`: the model's name in every request; empty sends none."""
    lora_path: str = ""
    """With SGLang: the adapter of every request; empty sends none."""
    max_in_flight: int = Field(0, ge=0)
    """The most calls that this worker has at one engine; 0 is as many as it has slots. Engines that
    say that they are full get less, and more again as they answer."""
    retry_budget: float = Field(0.2, ge=0, le=1)
    """Retries may be this share of the calls, over a minute, ten whatever it is; beyond it a call
    fails at once."""
    request_timeout_s: float = Field(600.0, gt=0)
    """How long one request may take."""
    connect_timeout_s: float = Field(5.0, gt=0)
    """How long one connection attempt may take."""
    max_retries: int = Field(4, ge=0)
    """How often one call is tried again, elsewhere where there is another engine."""
    retry_backoff_s: float = Field(0.2, gt=0)
    """First wait before a retry; doubles with jitter up to `retry_backoff_max_s`."""
    retry_backoff_max_s: float = Field(5.0, gt=0)
    """The longest wait between two tries."""
    abort_wait_s: float = Field(2.0, ge=0)
    """How long the partial reply of a call that was aborted is waited for: before a retry, and at
    an update that stops calls."""
    probe_interval_s: float = Field(2.0, gt=0)
    """How often an engine is asked whether it is there."""
    routed_experts: bool = False
    """Ask for the experts that every token was routed to (R3) and deliver them with the sample; the
    server needs --enable-return-routed-experts."""
    indexer_topk: bool = False
    """Ask for the indexer's choice too (sparse attention); --enable-return-indexer-topk."""
    replay_layers: int = Field(0, ge=0)
    """Layers of a row of routed experts; 0 reads the config.json beside the tokenizer."""
    replay_top_k: int = Field(0, ge=0)
    """Experts of a token in a layer; 0 reads the config.json beside the tokenizer."""

    @field_validator("urls", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = value.split(",")
        if not isinstance(value, list | tuple):
            return value
        urls = [url.strip().rstrip("/") if isinstance(url, str) else url for url in value]
        for url in urls:
            if isinstance(url, str) and is_name_with_tls(url):
                raise ValueError(NO_NAME_WITH_TLS)
            plain = url.removeprefix("dns+").removeprefix("router+") if isinstance(url, str) else ""
            if plain and not plain.startswith(("http://", "https://")):
                raise ValueError(
                    "URLs that start with http:// or https://, or with dns+ or router+ before that"
                )
        return tuple(url for url in urls if url)


class SamplingTable(Table):
    """The distribution that the engines sample from."""

    temperature: float = Field(1.0, ge=0)
    """Of training samples; a row or an environment may have its own."""
    max_new_tokens: int = Field(1024, ge=1)
    """Cap of one reply (the per-turn cap)."""
    max_response_tokens: int | None = Field(None, ge=1)
    """Cap of everything after the first prompt, sampled or observed."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1 the log-probs are not those of the sampled distribution."""
    top_k: int = -1
    """-1 is all; anything else needs `allow_off_distribution`."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Above 0 needs `allow_off_distribution`."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end a reply, beside the chat format's own."""
    allow_off_distribution: bool = False
    """Permit parameters under which log-probs no longer are those of the sampled distribution."""

    @field_validator("top_k", "stop", "stop_token_ids")
    @classmethod
    def _check(cls, value: Any, info: ValidationInfo) -> Any:
        if problem_of(info.field_name or "", value):
            raise ValueError(PARAMETERS[info.field_name or ""].expected)
        return value


NO_REWARD = "none"
"""`reward.kind` where no sample is scored by itself: the trainer scores, or `reward.group` does."""


class RewardTable(Table):
    """How samples are scored."""

    kind: str = "math"
    """A built-in name (docs/rewards.md), `none` (the trainer scores), or a dotted path. Where an
    environment names none of its own, a row's `metadata.rm_type` may name a built-in."""
    key: str | None = None
    """Which entry of a reward dictionary is the reward."""
    group: str = ""
    """A function over all samples of a group, `pkg.module:name` or `PATH.py:name`, that scores
    those which have no reward yet; needs `kind = "none"`. The aggregator calls it, before the
    filters (docs/rewards.md)."""
    isolated: tuple[str, ...] = ("math_verify", "code")
    """Rewards that run in a process of their own, through the verifier: built-in names, and paths
    of functions of yours."""
    timeout_s: float = Field(30.0, gt=0)
    """How long one reward may take."""
    max_retries: int = Field(2, ge=0)
    """How often a verdict that could not be had is asked for again; the sample itself is not
    generated again for it."""
    retry_backoff_s: float = Field(0.5, gt=0)
    """First wait before that; doubles with jitter."""
    url: str = ""
    """With `remote`: where samples are posted to (docs/rewards.md)."""
    token_file: Path | None = None
    """With `remote`: a file with the bearer token (a mounted secret)."""
    batch_size: int = Field(1, ge=1, le=1024)
    """With `remote`: samples of one request, at most."""
    batch_wait_s: float = Field(0.05, ge=0)
    """With `remote`: how long a request waits for more of them."""
    isolated_share: float = Field(0.0, ge=0, le=1)
    """Share of samples that `math_verify` scores, isolated, in place of `kind`."""


class EnvTable(Table):
    """A named mix of generate function, tools, reward and filters; rows name theirs."""

    n_samples_per_prompt: int = Field(8, ge=1, le=4096)
    """Samples of each prompt; default `producer.n_samples_per_prompt`."""
    generate: str = "multi_turn"
    """`single_turn`, `multi_turn`, `agent`, `env` or a dotted path; default `worker.generate`."""
    agent: str = ""
    """With `agent`: the function that runs it; default `worker.agent`."""
    max_turns: int = Field(8, ge=1)
    """Engine calls a trajectory may make; default `worker.max_turns`."""
    tools: tuple[str, ...] = ()
    """Tools of the environment, as in `worker.tools` (its default)."""
    reward: RewardTable = RewardTable()
    """How its samples are scored; each key's default is that of `[reward]`."""
    filters: tuple[str, ...] = ()
    """Filters of its groups, in order; default `aggregator.filters`."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Its own sampling parameters, over those of `[sampling]`."""
    execute_last_turn: bool = False
    """Run the calls of the last permitted turn too; default `worker.execute_last_turn`."""
    environment: str = ""
    """With `generate = "env"`: what answers the model, as in `worker.environment` (its default)."""
    on_truncated: Literal["keep", "mask", "drop"] = "keep"
    """What becomes of samples that a limit cut; default `aggregator.on_truncated`."""
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Its share of the groups, relative to the other environments'; needs `source`."""
    source: str = ""
    """Where its prompts come from, as in `producer.source`, which is empty then: groups of all
    environments are mixed by `weight`."""

    def rule(self) -> EnvRule:
        """Return what every process of a run, the trainer too, knows of this environment.

        Raises:
            ConfigError: a group reward beside a reward of each sample.
        """
        from rollstream.group import EnvRule  # needs numpy, which reading a configuration does not

        reward = self.reward
        if reward.group and reward.kind != NO_REWARD:
            raise ConfigError(
                f"reward.group = {reward.group!r} scores the samples, but so does reward.kind = "
                f"{reward.kind!r}: set reward.kind to {NO_REWARD!r}, or leave reward.group out"
            )
        return EnvRule(
            reward_key=reward.key,
            needs_reward=reward.kind != NO_REWARD or bool(reward.group),
            group_reward=bool(reward.group),
            on_truncated=self.on_truncated,
        )

    @field_validator("sampling")
    @classmethod
    def _check(cls, value: dict[str, Any]) -> dict[str, Any]:
        for problem in filter(None, (problem_of(name, given) for name, given in value.items())):
            raise ValueError(f"parameters of an engine; {problem}")
        return value


class ProducerTable(Table):
    """Where prompts come from and how many may be in flight."""

    source: str = ""
    """`jsonl:PATH` or `reasoning_gym:NAME?size=…&seed=…`."""
    n_samples_per_prompt: int = Field(8, ge=1, le=4096)
    """Samples of each prompt; a row may have its own `n`."""
    epochs: int = Field(1, ge=1)
    """How often every row is used."""
    shuffle_seed: int | None = Field(None, ge=0)
    """None keeps the order of the file."""
    capacity_groups: int = Field(512, ge=1, le=1_000_000)
    """How many groups may be live at once: the back-pressure."""
    over_sampling: float = Field(1.0, ge=1.0)
    """Groups that may be live, over those that a step of the trainer takes: room for those that
    filters drop. Counts where `weights.groups_per_step` and a bounded staleness set the
    capacity."""
    on_bad_row: Literal["error", "skip"] = "error"
    """`error` stops before anything is enqueued where it can; `skip` counts the row and goes on."""
    keys: dict[str, str] = Field(default_factory=dict)
    """Renamed columns: {our name: the file's name}."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Prompts whose text has more tokens (of `model.tokenizer`) are skipped and counted."""
    progress: bool = True
    """A bar on a terminal, a line every few seconds elsewhere."""
    stay: bool = True
    """Stay after the end of data: a trainer that restarts from an older checkpoint needs prompts
    again. False ends the process there."""


class WorkerTable(Table):
    """One worker process."""

    concurrency: int = Field(256, ge=1, le=8192)
    """Samples that run at once in one process."""
    generate: str = "multi_turn"
    """`single_turn`, `multi_turn`, `agent`, `env`, `pkg.module:name` or `PATH.py:name`."""
    agent: str = ""
    """With `agent`: the function that runs it, `pkg.module:name` or `PATH.py:name`; it is given the
    URL of a chat API (docs/agents.md)."""
    max_turns: int = Field(8, ge=1)
    """Engine calls that a trajectory may make."""
    tools: tuple[str, ...] = ()
    """`calculator`, `python`, `pkg.module:name`, `PATH.py:name`, `mcp:NAME`, `mcp:NAME/TOOL`
    (docs/tools.md)."""
    tool_timeout_s: float = Field(30.0, gt=0)
    """How long one tool call may take."""
    tool_output_chars: int = Field(16384, ge=64)
    """Longer tool results are cut; in characters, the marker of the cut included."""
    tool_output_side: Literal["middle", "left", "right"] = "middle"
    """What is cut away of a longer one: `left` keeps its end, `right` its beginning."""
    tool_output_tokens: int | None = Field(None, ge=16)
    """The same in tokens of the model, the marker included; none leaves it to the characters."""
    tool_concurrency: int = Field(256, ge=1)
    """Calls of one tool that run at once in one process; the others wait, within their time."""
    environment: str = ""
    """With `generate = "env"`: `reasoning_gym`, `openenv:URL`, or the path of a class or function
    of yours that makes an environment (docs/environments.md)."""
    max_environments: int = Field(256, ge=1)
    """Environments that are open at once in one process; a sample waits for its own."""
    environment_timeout_s: float = Field(60.0, gt=0)
    """How long one `reset`, `step` or `close` of an environment may take."""
    max_parallel_calls: int = Field(64, ge=1)
    """Tool calls of one turn that are run; the model is told of the others."""
    sample_timeout_s: float = Field(3600.0, gt=0)
    """How long one sample may take."""
    max_seq_len: int | None = Field(None, ge=1)
    """Longest trajectory in tokens; none is `model.max_context_tokens`."""
    execute_last_turn: bool = False
    """Run the calls of the last permitted turn too; off, they are recorded."""
    on_divergence: Literal["reject", "fork", "keep_prefix"] = "reject"
    """What becomes of recorded turns whose client rewrote history: a `merge_error`, several samples
    of one rollout, or one sample of what the newest turn still holds."""
    lease_s: float = Field(15.0, ge=0.5)
    """After how long without a beat a member is taken from its worker."""
    max_attempts: int = Field(3, ge=1)
    """How often a member may fail before it fails for good."""
    max_crashes: int = Field(4, ge=1)
    """How often its lease may expire before it counts as poison."""
    retry_delay_s: float = Field(0.5, ge=0)
    """First wait before a failed member is leased again; doubles per attempt, with jitter."""
    max_body_bytes: int = Field(16 << 20, ge=1024)
    """Largest result of one member; a larger one is `too_large`. A row of the producer whose record
    is larger is a bad row."""
    stall_limit_s: float = Field(60.0, ge=0)
    """How long the event loop may stand still (user code blocks it) before the process ends with
    exit code 5, to be started again; never less than a lease. 0 is for ever."""
    drain_s: float = Field(20.0, ge=0)
    """How long SIGTERM waits for samples in flight before it gives them back."""
    fail_after_groups: int = Field(20, ge=1)
    """Refused groups of an environment in a row, without one success, that end the run as failed
    where no other environment works (docs/prompts.md)."""
    submission: Literal["sample", "group"] = "sample"
    """`sample` frees a slot when its sample ends; `group` only when all of its group's have that
    this worker leased (as older systems do, for comparison)."""
    role: Literal["all", "rollout", "aggregator"] = "all"
    """`all` generates and aggregates; the others do one of both."""


class AggregatorTable(Table):
    """When a full group is delivered."""

    filters: tuple[str, ...] = ("no_aborted", "reward_nonzero_std")
    """Dynamic filters over full groups, in order."""
    min_samples: int | None = Field(None, ge=1)
    """Usable members that a group needs; None is all n."""
    group_timeout_s: float = Field(0.0, ge=0)
    """Deadline of a group from its first lease; 0 is none."""
    on_filter_error: Literal["drop", "stop"] = "drop"
    """What a filter that raises does: `drop` its group, or `stop` the run."""
    filter_timeout_s: float = Field(10.0, gt=0)
    """How long one filter of the user's may take over one group; then it is `filter_error`."""
    std_threshold: float = Field(1e-6, ge=0)
    """Rewards whose deviation is not above it are `zero_std`."""
    keep_when_insufficient: bool = False
    """`reward_nonzero_std` keeps a group of several of which only one member is usable."""
    on_truncated: Literal["keep", "mask", "drop"] = "keep"
    """What becomes of samples that a limit cut: trained, delivered with no token to train, or
    missing from their group."""
    stop_after_dropped_batches: int = Field(10, ge=0)
    """Batches' worth of groups that are dropped by filters or as short in a row, not one kept
    between them, that end the run as failed; 0 is never. A batch is `weights.groups_per_step`, or
    the capacity."""


class WeightsTable(Table):
    """How old a sample may be, and what new weights do to the samples that run."""

    mode: Literal["async", "on_policy", "colocated"] = "async"
    """How old samples may be, and what an update does where the trainer does not say. `async`: by
    `max_staleness`, and calls in flight go on. `on_policy`: no staleness, and calls in flight are
    stopped; needs `groups_per_step`. `colocated`, for trainers on the same GPUs: the same, and the
    engines are told to stop whatever else they run, such as calls of workers that died."""
    max_staleness: int = Field(-1, ge=-1)
    """Versions; -1 is unbounded. 0 with `on_policy` and `colocated`, whatever stands here."""
    groups_per_step: int | None = Field(None, ge=1)
    """Groups that one step of the trainer takes, at most `producer.capacity_groups`: with a bounded
    staleness the producer then keeps at most `groups_per_step * (1 + max_staleness)` live, so that
    few groups get stale at all. Must be set where `mode` is not `async`."""
    on_stale: Literal["drop", "requeue", "deliver"] | None = None
    """What becomes of a group that is too old: dropped, begun anew (at most `max_requeues` times,
    then dropped), or delivered all the same. None is `drop`, and `requeue` where `mode` is not
    `async`."""
    max_requeues: int = Field(3, ge=0)
    """How often one group may begin anew."""
    partial: bool = False
    """Samples that are stopped (by an update, an engine, or the end of their worker) keep their
    tokens, and whoever leases them next goes on from there. Functions of your own: see
    docs/weights.md."""
    max_resumes: int = Field(16, ge=1)
    """How often one sample may be resumed; then it begins anew, which counts as an attempt."""
    mask_offpolicy: bool = False
    """Of a sample over several versions only the newest one's tokens are trained on."""


class RqTable(Table):
    """Where the isolated rewards' jobs go; empty is the run's Redis."""

    url: SecretStr | None = None
    """Redis of the jobs of isolated rewards; none is `redis.url`."""

    @field_validator("url")
    @classmethod
    def _check(cls, value: SecretStr | None) -> SecretStr | None:
        return None if value is None else _checked_url(value)


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
    log_format: Literal["json", "console"] = "json"
    """`json` for machines, `console` for a person."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is written."""
    rescore_fraction: float = Field(0.0, ge=0, le=1)
    """Share of finished samples whose log-probs are held against a prefill of the same engines, in
    the background: `rollout_logprob_difference`."""


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
    """Keep the messages of every sample in its metadata."""
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
    verifier: VerifierTable = VerifierTable()
    tool: dict[str, ToolTable] = Field(default_factory=dict)
    mcp: dict[str, McpTable] = Field(default_factory=dict)
    telemetry: TelemetryTable = TelemetryTable()
    gateway: GatewayTable = GatewayTable()
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
