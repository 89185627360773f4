"""The tables about rollouts: prompts, workers, environments, rewards, groups and weights.

Owns these keys, their defaults and checks. Never reads a value from anywhere. Invariant: a key that
an environment may have of its own is named as the flat key that it overrides.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from rollstream.errors import ConfigError
from rollstream.parameters import problem_of
from rollstream.settings.table import Table

if TYPE_CHECKING:
    from rollstream.group import EnvRule

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
