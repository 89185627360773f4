"""From the configuration to what a worker runs with: every name resolved, every value checked.

Owns the checks before the first lease. Never talks to Redis or an engine. Invariant: whatever is
wrong with a function, tool, reward, filter, tokenizer or sampling parameter is one `ConfigError`
here, and nothing was leased.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import structlog

from rollstream.errors import ConfigError
from rollstream.parameters import off_problem
from rollstream.settings import NO_REWARD, EnvTable, RewardTable, Settings

from ..aggregate.judge import EnvJudge
from ..aggregate.loader import load_filters
from ..generate.loader import AGENT, ENV, resolve_generate
from ..generate.resumable import is_resumable
from ..members.work import EnvRuntime, Scorer
from ..sampling import Sampling
from ..tools import ToolLoader
from ..tools.load import PYTHON
from ..tools.mcp import McpServers
from ..types import DivergencePolicy, GenerateFunction, Limits, Tool

if TYPE_CHECKING:
    from ..aggregate.group_reward import GroupReward
    from ..isolation import Isolated
    from ..rewards import Scorer as RewardScorer
    from ..tito.load import LoadedRenderer

log = structlog.get_logger("worker")

UNSEEN_TOOLS = (
    "the chat format does not show tool specs, so the model is not told that these tools exist: "
    "describe them in the prompts' system message, or remove them"
)


def env_runtimes(
    settings: Settings,
    renderer: LoadedRenderer,
    scorers: Mapping[str, Scorer | None],
    agents: Mapping[str, GenerateFunction] | None = None,
    tools: ToolLoader | None = None,
) -> dict[str, EnvRuntime]:
    """Return every environment with its functions.

    Args:
        settings: all.
        renderer: gives the ids that end a turn.
        scorers: by environment; None where the trainer scores.
        agents: the generate functions that are made per environment (`agents.Serving`,
            `environments.Surroundings`).
        tools: loads tools; None is `tool_loader(settings)`.

    Raises:
        ConfigError: the environment, what is wrong, and what to do.
    """
    envs = {}
    loader = tools or tool_loader(settings)
    for name, table in settings.envs().items():
        try:
            generate = (agents or {}).get(name) or resolve_generate(table.generate)
            envs[name] = _env_runtime(
                settings, name, table, renderer, scorers[name], generate, loader
            )
        except ConfigError as error:
            raise ConfigError(f"environment {name!r}: {error}") from None
    loader.check()
    return envs


def _env_runtime(
    settings: Settings,
    name: str,
    table: EnvTable,
    renderer: LoadedRenderer,
    scorer: Scorer | None,
    generate: GenerateFunction,
    loader: ToolLoader,
) -> EnvRuntime:
    sampling = base_sampling(settings, renderer.stop_token_ids).with_overrides(table.sampling)
    table.rule()  # what is wrong with it is wrong in every process
    off = tuple(sampling.off_distribution())
    if off and not settings.sampling.allow_off_distribution:
        raise ConfigError(f"sampling.{off_problem(off[0], getattr(sampling, off[0]))}")
    worker = settings.worker
    return EnvRuntime(
        name=name,
        generate=generate,
        generate_path={AGENT: table.agent, ENV: table.environment}.get(table.generate)
        or table.generate,
        resumable=is_resumable(generate),
        limits=Limits(
            max_turns=table.max_turns,
            max_context=settings.model.max_context_tokens,
            max_response=settings.sampling.max_response_tokens,
            max_seq_len=worker.max_seq_len,
            tool_timeout_s=worker.tool_timeout_s,
            tool_output_chars=worker.tool_output_chars,
            tool_output_tokens=worker.tool_output_tokens,
            tool_output_side=worker.tool_output_side,
            max_parallel_calls=worker.max_parallel_calls,
            execute_last_turn=table.execute_last_turn,
            on_divergence=DivergencePolicy(worker.on_divergence),
        ),
        sampling=sampling,
        tools=loader.load(table.tools),
        scorer=scorer,
        marks=off,
    )


def tool_loader(
    settings: Settings,
    isolated: Isolated | None = None,
    servers: Callable[[str], Sequence[Tool]] | None = None,
) -> ToolLoader:
    """Return what loads the tools of all environments.

    Args:
        settings: of single tools, and of the worker.
        isolated: runs programs.
        servers: `mcp:NAME` and `mcp:NAME/TOOL` to tools.
    """
    return ToolLoader(
        settings.tool,
        concurrency=settings.worker.tool_concurrency,
        jobs=isolated,
        servers=servers,
    )


def mcp_servers(settings: Settings) -> McpServers:
    """Return the MCP servers that tools of any environment name, not started.

    Raises:
        ConfigError: a name that is no server's.
    """
    return McpServers(settings.mcp, [table.tools for table in settings.envs().values()])


def warn_of_unseen_tools(envs: Mapping[str, EnvRuntime], renderer: LoadedRenderer) -> None:
    """Say once which tools the model is not told of, because its chat format shows no specs."""
    if renderer.shows_tools:
        return
    unseen = {name: sorted(env.tools) for name, env in envs.items() if env.tools}
    if unseen:
        log.warning(
            "tools_not_shown_to_the_model",
            renderer=renderer.name,
            tools=sorted({tool for tools in unseen.values() for tool in tools}),
            environments=sorted(unseen),
            message=UNSEEN_TOOLS,
        )


def base_sampling(settings: Settings, stop_token_ids: tuple[int, ...]) -> Sampling:
    """Return the run's parameters; the ids that end a turn of the chat format always stop."""
    table = settings.sampling
    own = tuple(i for i in table.stop_token_ids if i not in stop_token_ids)
    return Sampling(
        temperature=table.temperature,
        max_new_tokens=table.max_new_tokens,
        top_p=table.top_p,
        top_k=table.top_k,
        min_p=table.min_p,
        stop=table.stop,
        stop_token_ids=(*stop_token_ids, *own),
    )


def env_judges(settings: Settings) -> dict[str, EnvJudge]:
    """Return how every environment's groups are judged.

    Raises:
        ConfigError: a filter or a group's reward that is unknown, wrong, or cannot be imported.
    """
    judges, aggregator = {}, settings.aggregator
    for name, table in settings.envs().items():
        try:
            rule = table.rule()
            filters = load_filters(
                table.filters,
                std_threshold=aggregator.std_threshold,
                keep_when_insufficient=aggregator.keep_when_insufficient,
            )
            group_reward = _group_reward(table.reward) if table.reward.group else None
        except ConfigError as error:
            raise ConfigError(f"environment {name!r}: {error}") from None
        judges[name] = EnvJudge(
            name=name,
            rule=rule,
            filters=filters,
            min_samples=aggregator.min_samples,
            filter_timeout_s=aggregator.filter_timeout_s,
            group_reward=group_reward,
        )
    return judges


def _group_reward(table: RewardTable) -> GroupReward | None:
    from ..aggregate.group_reward import load_group_reward  # what rewards need is slow to import

    return load_group_reward(table)


def build_isolated(settings: Settings, incarnation: str) -> Isolated | None:
    """Return what all rewards and tools of this process ask verifiers through, not started.

    None where nothing asks them.
    """
    from ..rewards import needs_isolation

    if not any(
        PYTHON in table.tools or needs_isolation(table.reward, is_own=says_its_kind(settings, name))
        for name, table in settings.envs().items()
    ):
        return None
    from ..isolation import Isolated

    rq_url = settings.rq.url
    return Isolated(
        redis_url=settings.redis_url(),
        rq_url=None if rq_url is None else rq_url.get_secret_value(),
        run=settings.run.name,
        incarnation=incarnation,
        ca=None if settings.redis.ca is None else str(settings.redis.ca),
    )


def asks_verifiers(settings: Settings) -> bool:
    """Return whether something asks verifiers for sure, not only where a row happens to want it."""
    from ..rewards import always_isolated

    envs = settings.envs().values()
    return any(always_isolated(table.reward) or PYTHON in table.tools for table in envs)


def says_its_kind(settings: Settings, name: str) -> bool:
    """Return whether `reward.kind` was set in the environment's own table."""
    own = settings.env.get(name)
    return (
        own is not None
        and "reward" in own.model_fields_set
        and ("kind" in own.reward.model_fields_set)
    )


def build_scorers(
    settings: Settings, renderer: LoadedRenderer, isolated: Isolated | None
) -> dict[str, RewardScorer | None]:
    """Return every environment's scorer, not started.

    Raises:
        ConfigError: a reward that is unknown or cannot be imported.
    """
    from ..rewards import build_scorer

    scorers: dict[str, RewardScorer | None] = {}
    for name, table in settings.envs().items():
        if table.reward.kind == NO_REWARD:
            scorers[name] = None
            continue
        try:
            scorers[name] = build_scorer(
                table.reward,
                renderer=renderer,
                run_seed=settings.run.seed,
                isolated=isolated,
                is_own=says_its_kind(settings, name),
            )
        except ConfigError as error:
            raise ConfigError(f"environment {name!r}: {error}") from None
    return scorers
