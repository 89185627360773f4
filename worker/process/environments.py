"""What of a worker answers the model in place of tools: its environments, from the configuration.

Owns their making, their start and their end. Never leases, never runs an episode. Invariants:
whatever is wrong with an environment is one `ConfigError` before anything is leased; a worker
without environments imports nothing of theirs; behind `aclose` none is open.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from rollstream.errors import ConfigError, RewardFault
from rollstream.settings import NO_REWARD, EnvTable, Settings

from ..generate.loader import ENV
from ..types import GenerateFunction

if TYPE_CHECKING:
    from ..environments.load import LoadedEnvironment


def surroundings(settings: Settings) -> Surroundings | None:
    """Return the environments that samples run in; None where there are none.

    Raises:
        ConfigError: the environment, what is wrong, and what to do.
    """
    tables = {}
    for name, table in settings.envs().items():
        if table.generate == ENV:
            tables[name] = table
        elif name in settings.env and settings.env[name].environment:
            raise ConfigError(
                f"env.{name}.environment is given, but its generate is {table.generate!r}; set "
                f'env.{name}.generate = "env", or remove it'
            )
    if tables:
        return Surroundings(settings, tables)
    if settings.worker.environment:
        raise ConfigError(
            'worker.environment is given, but no environment has generate = "env"; set '
            'worker.generate = "env", or remove it'
        )
    return None


class Surroundings:
    """The environments of one worker, with the generate functions in front of them."""

    def __init__(self, settings: Settings, tables: dict[str, EnvTable]) -> None:
        """Resolve every name; nothing is made or reached yet."""
        from ..environments.life import Environments
        from ..environments.load import load_environment
        from ..generate.environment import EpisodeRules, episodes

        worker = settings.worker
        self.environments = Environments(
            most=worker.max_environments, timeout_s=worker.environment_timeout_s
        )
        self._loaded: dict[str, LoadedEnvironment] = {}
        self.generates: dict[str, GenerateFunction] = {}
        """By environment of the configuration."""
        for name, table in tables.items():
            if not table.environment:
                raise ConfigError(
                    f'environment {name!r}: generate = "env" needs what answers the model: name '
                    "it in worker.environment or env.NAME.environment (reasoning_gym, openenv:URL, "
                    "'pkg.module:name' or 'PATH.py:name')"
                )
            try:
                loaded = self._loaded.get(table.environment) or load_environment(
                    table.environment, timeout_s=worker.environment_timeout_s
                )
            except ConfigError as error:
                raise ConfigError(f"environment {name!r}: {error}") from None
            self._loaded[table.environment] = loaded
            rules = EpisodeRules(settings.run.seed, is_scored=_is_scored(settings, name))
            self.generates[name] = episodes(self.environments, loaded, rules)

    async def start(self) -> None:
        """Import what takes time, and reach the servers.

        Raises:
            ConfigError: a package is missing, or a server does not answer.
        """
        from ..bounded import in_thread

        for loaded in self._loaded.values():
            if loaded.start is None:
                continue
            try:
                if inspect.iscoroutinefunction(loaded.start):
                    await loaded.start()
                else:
                    await in_thread(loaded.start)
            except RewardFault as fault:
                raise ConfigError(f"environment {loaded.name!r}: {fault.message}") from None

    async def aclose(self) -> None:
        """Wait for the environments that are being closed, bounded; safe to repeat."""
        await self.environments.aclose()


def _is_scored(settings: Settings, name: str) -> bool:
    """Return whether its own reward was asked for by name: it is the sample's then, and no default.

    The flat `reward.kind` beside environment tables is what the others fall back to.
    """
    table = settings.env[name].reward if settings.env else settings.reward
    return "kind" in table.model_fields_set and table.kind != NO_REWARD
