"""What a worker serves to agents: the book of sessions, the server in front of it, and the agents.

Owns their making from the configuration, their start and their end. Never leases, never reads a
request. Invariants: whatever is wrong with an agent, a matcher or a picker is one `ConfigError`
before anything is leased; a worker without agents imports no server; behind `aclose` no agent's
request is under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from rollstream.errors import ConfigError
from rollstream.settings import EnvTable, Settings

from ..generate.agent import AgentLimits, Agents
from ..generate.agent_function import AgentFunction, resolve_agent
from ..generate.loader import AGENT
from ..types import DivergencePolicy, GenerateFunction

if TYPE_CHECKING:
    from ..telemetry.metrics import Metrics
    from ..tito.load import LoadedRenderer

log = structlog.get_logger("worker")


def agents_of(settings: Settings) -> dict[str, AgentFunction]:
    """Return the agent of every environment that has one.

    Raises:
        ConfigError: the environment, what is wrong, and what to do.
    """
    envs = settings.envs()
    found = {}
    for name, table in envs.items():
        if table.generate == AGENT:
            try:
                found[name] = _agent_of(table)
            except ConfigError as error:
                raise ConfigError(f"environment {name!r}: {error}") from None
        elif name in settings.env and settings.env[name].agent:
            raise ConfigError(
                f"env.{name}.agent is given, but its generate is {table.generate!r}; set "
                f'env.{name}.generate = "agent", or remove it'
            )
    if settings.worker.agent and not found:
        raise ConfigError(
            'worker.agent is given, but no environment has generate = "agent"; set '
            'worker.generate = "agent", or remove it'
        )
    gateway = settings.gateway
    if found and gateway.session == "tree" and "on_divergence" in gateway.model_fields_set:
        raise ConfigError(
            'gateway.on_divergence is of linear sessions; with gateway.session = "tree" every '
            "branch is kept: remove it, and choose by gateway.picker which become samples"
        )
    return found


def _agent_of(table: EnvTable) -> AgentFunction:
    if not table.agent:
        raise ConfigError(
            'generate = "agent" runs a function of yours: name it in worker.agent or env.NAME.agent'
            " ('pkg.module:name' or 'PATH.py:name')"
        )
    return resolve_agent(table.agent)


def serving(
    settings: Settings, renderer: LoadedRenderer, agents: Mapping[str, AgentFunction]
) -> Serving | None:
    """Return what serves the agents; None where there is none, and nothing was imported.

    Raises:
        ConfigError: an unknown matcher or picker.
    """
    return Serving(settings, renderer, agents) if agents else None


class Serving:
    """The gateway of one worker, with the generate functions behind it."""

    def __init__(
        self, settings: Settings, renderer: LoadedRenderer, agents: Mapping[str, AgentFunction]
    ) -> None:
        """Make everything; nothing listens yet."""
        from ..gateway.book import Book
        from ..gateway.dialects.anthropic import AnthropicMessages
        from ..gateway.dialects.openai_chat import OpenAIChat
        from ..gateway.dialects.responses import OpenAIResponses
        from ..gateway.limits import HttpLimits
        from ..gateway.prompting import Prompter
        from ..gateway.server import Gateway

        table = settings.gateway
        self._settings, self._functions = settings, agents
        self._prompter = Prompter(renderer)
        self.book = Book()
        self.gateway = Gateway(
            self.book,
            [OpenAIChat(), AnthropicMessages(), OpenAIResponses()],
            host=table.host,
            port=table.port,
            public_url=table.public_url,
            limits=HttpLimits(max_body_bytes=table.max_body_bytes, keepalive_s=table.keepalive_s),
        )
        self._agents = Agents(self.book, self.gateway)
        self.generates = {name: self._generate(name) for name in agents}
        """By environment."""

    def _generate(self, name: str) -> GenerateFunction:
        from ..gateway.matchers import resolve_matcher
        from ..gateway.picker import resolve_picker
        from ..gateway.session import SessionRules

        settings, table = self._settings, self._settings.gateway
        rules = SessionRules(
            kind=table.session,
            on_divergence=DivergencePolicy(table.on_divergence),
            matcher=resolve_matcher(table.matcher),
            picker=resolve_picker(table.picker),
            prompter=self._prompter,
            max_turns=min(table.max_turns, asked_turns(settings, name) or table.max_turns),
            max_tokens=table.max_session_tokens,
            max_in_flight=table.max_in_flight,
        )
        limits = AgentLimits(table.agent_timeout_s, settings.worker.max_seq_len)
        return self._agents.generate(self._functions[name], rules, limits)

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: no port is free.
        """
        port = await self.gateway.start()
        table = self._settings.gateway
        url = self.gateway.base_url("").removesuffix("/sessions/")
        log.info("gateway_ready", url=url, host=table.host, port=port, session=table.session)

    async def aclose(self) -> None:
        """Wait for the agents that were told to stop, then stop listening; safe to repeat."""
        await self._agents.aclose()
        await self.gateway.aclose()

    def publish(self, metrics: Metrics) -> None:
        """Set what is shown of it."""
        metrics.gateway(self.gateway.counters, self.book.num_open)


def asked_turns(settings: Settings, name: str) -> int | None:
    """Return an environment's `max_turns` where it is given: its default is our own loops'."""
    if name in settings.env and "max_turns" in settings.env[name].model_fields_set:
        return settings.env[name].max_turns
    worker = settings.worker
    return worker.max_turns if "max_turns" in worker.model_fields_set else None
