"""`openenv:URL`: environments of an OpenEnv server, through the generic client of `openenv-core`.

Owns the way from a reply to an action and from an observation to a text. Never starts a server, and
imports the package, which takes seconds, only in a process that asks for it. Invariants: one sample
is one session of the server (a WebSocket); what the policy wrote wrong is an observation that it
can answer, and only what the server does wrong is a fault.

    openenv:http://127.0.0.1:8000?action=guess&observation=text

`action` is the field of the server's action that gets the reply's text. It may be left out where an
action has one required field; where it has several, the model has to answer with a JSON object.
`observation` is the field that the model reads: by default the only one there is, or all as JSON.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

from rollstream.errors import ConfigError, EnvFault
from rollstream.sample import Message

from .types import EnvSample, Observation, StepResult

START_S = 10.0
"""How long start-up waits for the server's schema."""
PARAMETERS = ("action", "observation")
METADATA = "openenv"
"""Entry of a row's metadata with parameters of `reset`, over `seed`."""
_REFUSED = "(code: VALIDATION_ERROR)"
"""How the client says that the server takes no such action."""
_FULL = "(code: CAPACITY_REACHED)"
_PATIENCE, _FIRST_WAIT_S, _LONGEST_WAIT_S = 0.8, 0.1, 2.0
"""Which part of the time of a reset is waited for a session, and how long between two tries."""
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_OURS = "metadata"
"""A field that every action has, of the package's own."""


@dataclass(frozen=True, slots=True)
class ActionForm:
    """How a reply becomes an action."""

    text_field: str | None = None
    """Gets the text; None where the reply is JSON."""
    fields: tuple[str, ...] = ()
    """Those of the action, for messages to the model."""
    value_field: str | None = None
    """The only required field, of another type than text: the reply may be its value."""

    def action_of(self, text: str) -> dict[str, Any] | None:
        """Return the action that a reply is; None where it is none."""
        if self.text_field is not None:
            return {self.text_field: text}
        fenced = _FENCED.findall(text)
        try:
            value = json.loads(fenced[-1] if fenced else text)
        except (ValueError, RecursionError):
            return None
        if isinstance(value, dict):
            return value
        return None if self.value_field is None else {self.value_field: value}

    @property
    def wanted(self) -> str:
        """Say what is expected, for the model."""
        if self.value_field is not None:
            return f"the value of {self.value_field} as JSON"
        return f"one JSON object with the fields {', '.join(self.fields)}"


class OpenEnvFactory:
    """Makes the environments of one server."""

    resumable = False

    def __init__(self, spec: str, *, timeout_s: float) -> None:
        """Read the specification; connects to nothing.

        Args:
            spec: `URL` with `action` and `observation` as parameters.
            timeout_s: of one answer of the server.

        Raises:
            ConfigError: it is none.
        """
        parts = urlsplit(spec)
        given = parse_qs(parts.query, keep_blank_values=True)
        unknown = sorted(set(given) - set(PARAMETERS))
        if unknown or parts.scheme not in ("http", "https") or not parts.netloc:
            what = f"unknown parameter {unknown[0]!r}" if unknown else "no http URL"
            raise ConfigError(
                f"environment 'openenv:{spec}': {what}; write "
                "openenv:http://HOST:PORT?action=FIELD&observation=FIELD"
            )
        self.url = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
        self._asked = given.get("action", [""])[-1]
        self._shown = given.get("observation", [""])[-1]
        self._timeout_s = timeout_s
        self._client: Any = None
        self._form = ActionForm(self._asked or None)

    async def start(self) -> None:
        """Import the package, and ask the server what an action is.

        Raises:
            ConfigError: the package is missing, the server does not answer, or it has no such
                field.
        """
        from ..bounded import in_thread

        self._client = await in_thread(_import_client)
        schema = await self._schema()
        self._form = form_of(schema.get("action"), self._asked, f"environment openenv:{self.url}")
        fields = _properties(schema.get("observation"))
        if self._shown and fields and self._shown not in fields:
            raise ConfigError(
                f"environment openenv:{self.url}: its observations have no field "
                f"{self._shown!r}; they have {', '.join(fields)}"
            )

    async def __call__(self, sample: EnvSample) -> OpenEnvEnv:
        """Return the environment of one sample, not connected yet."""
        del sample
        # Our own bound of each call is the same: the client's must not come first.
        client = self._client(
            self.url,
            connect_timeout_s=self._timeout_s,
            message_timeout_s=2 * self._timeout_s,
            mode="simulation",
        )
        return OpenEnvEnv(client, self._form, self._shown, self._timeout_s)

    async def _schema(self) -> Mapping[str, Any]:
        import httpx

        last = ""
        try:
            async with asyncio.timeout(START_S), httpx.AsyncClient(timeout=START_S) as http:
                while True:
                    try:
                        answer = await http.get(f"{self.url}/schema")
                        answer.raise_for_status()
                        schema = answer.json()
                        if isinstance(schema, Mapping):
                            return schema
                        last = "its /schema is no JSON object"
                    except (httpx.HTTPError, ValueError) as error:
                        last = f"{type(error).__name__} {error}".strip()
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise ConfigError(
                f"environment openenv:{self.url}: no OpenEnv server answers within {START_S:g} s "
                f"({last or 'no answer'}); start it, or check the URL"
            ) from None


class OpenEnvEnv:
    """One session of the server."""

    def __init__(self, client: Any, form: ActionForm, shown: str, timeout_s: float) -> None:
        self._client, self._form, self._shown = client, form, shown
        self._timeout_s = timeout_s

    async def reset(self, sample: EnvSample) -> Observation:
        """Begin a session and an episode; a server that is full is asked again.

        Raises:
            EnvFault: it stayed full, or the episode is over before it began.
        """
        given = sample.metadata.get(METADATA)
        parameters = {"seed": sample.seed} | (given if isinstance(given, dict) else {})
        due_mono_s = time.monotonic() + _PATIENCE * self._timeout_s
        wait_s = _FIRST_WAIT_S
        while (result := await self._unless_full(parameters)) is None:
            await self._client.disconnect()
            if time.monotonic() + wait_s >= due_mono_s:
                raise EnvFault(
                    "the OpenEnv server has as many sessions as it takes: raise its "
                    "max_concurrent_envs, or lower worker.max_environments",
                    retryable=True,
                    detail="full",
                )
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        if result.done:
            raise EnvFault("the OpenEnv server says done at reset", detail="invalid")
        first: str | None = self._text(result.observation)
        return first

    async def _unless_full(self, parameters: dict[str, Any]) -> Any:
        """Return the server's answer to a reset; None where it has no session left."""
        from websockets.exceptions import ConnectionClosedOK

        try:
            return await self._client.reset(**parameters)
        except ConnectionClosedOK:
            # So it looks where it closed before we had sent: what it says of it gets lost.
            return None
        except RuntimeError as error:
            if not str(error).endswith(_FULL):
                raise
            return None

    async def step(self, message: Message) -> StepResult:
        """Turn a reply into an action, and have the server take it."""
        action = self._form.action_of(message["content"])
        if action is None:
            return StepResult(f"Error: answer with {self._form.wanted}.", info={"invalid": True})
        try:
            result = await self._client.step(action)
        except RuntimeError as error:
            if not str(error).endswith(_REFUSED):
                raise
            return StepResult(
                f"Error: this is no valid action. Answer with {self._form.wanted}.",
                info={"invalid": True},
            )
        return StepResult(self._text(result.observation), result.reward, result.done)

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    def _text(self, observation: Any) -> Any:
        """Return what the model reads of an observation; None where that is nothing."""
        if not isinstance(observation, dict) or not observation:
            return None if not observation else json.dumps(observation)
        if self._shown:
            value = observation.get(self._shown)
        else:
            value = next(iter(observation.values())) if len(observation) == 1 else observation
        return value if value is None or isinstance(value, str) else json.dumps(value)


def form_of(schema: Any, asked: str, where: str) -> ActionForm:
    """Return how replies become actions of this JSON schema.

    Raises:
        ConfigError: the field that was asked for is not there.
    """
    properties = _properties(schema)
    names = [name for name in properties if name != _OURS]
    if asked:
        if names and asked not in names:
            raise ConfigError(
                f"{where}: its actions have no field {asked!r}; they have {', '.join(names)}"
            )
        return ActionForm(asked, tuple(names))
    required = schema.get("required") if isinstance(schema, dict) else None
    needed = [name for name in names if isinstance(required, list) and name in required]
    only = needed[0] if len(needed) == 1 else names[0] if len(names) == 1 else None
    if only is None:
        return ActionForm(None, tuple(names))
    kind = properties[only].get("type") if isinstance(properties[only], dict) else None
    return (
        ActionForm(only, tuple(names)) if kind == "string" else ActionForm(None, tuple(names), only)
    )


def _properties(schema: Any) -> dict[str, Any]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _import_client() -> Any:
    try:
        from openenv.core.generic_client import (  # type: ignore[import-untyped]  # no py.typed
            GenericEnvClient,
        )
    except ImportError as error:
        raise ConfigError(
            f"environments of OpenEnv need its client, which cannot be imported ({error}); "
            "pip install openenv-core"
        ) from None
    return GenericEnvClient
