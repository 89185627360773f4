"""The user's agent: found, checked before the first sample runs, and how it is called.

Owns the contract of an agent function (that of miles): four arguments by name, further ones where
it takes them, and an `abort` beside it. Never talks to an engine, never judges what came back.
Invariant: whatever is wrong with the function or its `abort` is one `ConfigError` at start-up, and
what an agent is given is its own: nothing that it does to it reaches a sample or a sibling.

Example:
    >>> async def run(base_url, prompt, request_kwargs, metadata, **kw):
    ...     client = AsyncOpenAI(base_url=base_url, api_key=kw["api_key"])
    ...     ...  # any number of calls of the chat API at `base_url`
    ...     return {"reward": 1.0, "solved": True}
"""

from __future__ import annotations

import copy
import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rollstream.errors import ConfigError

from ..functions import UserFunction, resolve, sibling
from ..sampling import Sampling, request_kwargs
from ..tools import tool_specs
from ..types import GenerateInput

ARGUMENTS = ("base_url", "prompt", "request_kwargs", "metadata")
"""What every agent is called with, by name."""
EXTRA = ("label", "tools", "sample_index", "evaluation", "timeout_s", "api_key")
"""What it is called with too where it takes it: by name, or all of it through `**kw`."""
ABORT_ARGUMENTS = ("base_url", "metadata")
API_KEY = "rollstream"
"""SDKs refuse to start without a key; the session's key is in its URL, so nobody reads this one."""
_NEUTRAL = Sampling().to_dict()
_ALWAYS = frozenset({"temperature", "max_new_tokens"})
_OF_SDKS = frozenset(
    "temperature top_p max_tokens seed stop frequency_penalty presence_penalty logit_bias".split()
)
"""What is a parameter of chat completions as OpenAI has them."""


@dataclass(frozen=True, slots=True)
class AgentFunction:
    """An agent as the configuration names it."""

    path: str
    function: UserFunction
    extra: tuple[str, ...] = ()
    """Of `EXTRA`, what it takes."""
    abort: UserFunction | None = None
    """Told when we stop the agent before it returned."""

    def bound(self, given: GenerateInput, **arguments: Any) -> Callable[[], Any]:
        """Return the call that is to be made, with `arguments` by name."""
        return functools.partial(self.function, **arguments, **self._taken(given))

    def bound_abort(self, base_url: str, metadata: dict[str, Any]) -> Callable[[], Any]:
        """Return the call of its `abort`, which it has."""
        assert self.abort is not None
        return functools.partial(self.abort, base_url=base_url, metadata=metadata)

    def _taken(self, given: GenerateInput) -> dict[str, Any]:
        sample = given.sample
        known: dict[str, Callable[[], Any]] = {
            "label": lambda: copy.deepcopy(sample.label),
            "tools": lambda: copy.deepcopy(tool_specs(given.tools)),
            "sample_index": lambda: sample.index,
            "evaluation": lambda: given.evaluation,
            "timeout_s": lambda: max(given.deadline - time.monotonic(), 0.0),
            "api_key": lambda: API_KEY,
        }
        return {name: known[name]() for name in self.extra}


def resolve_agent(path: str) -> AgentFunction:
    """Return the agent that the configuration names, checked.

    Args:
        path: `pkg.module:name` or `PATH.py:name`; async or not (then it runs in a thread).

    Raises:
        ConfigError: with the path, what failed and what to do.
    """
    function = resolve(path, "agent")
    extra = _extra_of(function, path, ARGUMENTS, EXTRA)
    abort = getattr(function, "abort", None) or sibling(path, "agent", "abort")
    if abort is None:
        return AgentFunction(path, function, extra)
    if not callable(abort):
        raise ConfigError(
            f"agent {path!r}: its abort is {type(abort).__name__}, not a function; write "
            "`async def abort(base_url, metadata, **kw)`"
        )
    _extra_of(abort, f"{path} (its abort)", ABORT_ARGUMENTS, ())
    return AgentFunction(path, function, extra, abort)


def _extra_of(
    function: UserFunction, path: str, arguments: tuple[str, ...], extra: tuple[str, ...]
) -> tuple[str, ...]:
    """Return what of `extra` a function takes by name, once it is sure that it can be called."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a built-in without a signature is taken at its word
        return ()
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    taken = tuple(name for name in extra if takes_all or name in signature.parameters)
    try:
        signature.bind(**dict.fromkeys((*arguments, *taken)))
    except TypeError as error:
        raise ConfigError(
            f"agent {path!r} is called with the arguments {', '.join(arguments)} by name, but its "
            f"signature is {signature}: {error}; write `async def "
            f"{getattr(function, '__name__', 'run')}({', '.join(arguments)}, **kw)`"
        ) from None
    return taken


def chat_kwargs(given: GenerateInput) -> dict[str, Any]:
    """Return the sampling parameters in the words of a chat request.

    Fit for `create(**kwargs)` of the openai SDK: names that are an engine's own (`top_k`, `min_p`,
    `stop_token_ids`, …) stand under `extra_body`, since its signature refuses them. The gateway
    pins all of them whatever a client sends, so what is as every API has it by default is left out.
    """
    told = given.sampling.to_dict()
    closing = set(given.renderer.stop_token_ids)
    if closing.issuperset(told["stop_token_ids"]):
        told["stop_token_ids"] = _NEUTRAL["stop_token_ids"]
    words = request_kwargs(
        {
            name: value
            for name, value in told.items()
            if name in _ALWAYS or value != _NEUTRAL.get(name)
        }
    )
    plain = {name: value for name, value in words.items() if name in _OF_SDKS}
    if engines_own := {name: value for name, value in words.items() if name not in _OF_SDKS}:
        plain["extra_body"] = engines_own
    return plain


def agent_metadata(
    given: GenerateInput, *, base_url: str, instance_id: str, max_seq_len: int | None
) -> dict[str, Any]:
    """Return the row's metadata, a copy of its own, and where the session is served."""
    url = urlsplit(base_url)
    port = url.port or (443 if url.scheme == "https" else 80)
    metadata: dict[str, Any] = copy.deepcopy(given.sample.metadata)
    metadata["session_server_id"] = f"{url.hostname}:{port}"
    metadata["session_server_instance_id"] = instance_id
    if max_seq_len is not None:
        metadata["max_seq_len"] = max_seq_len
    return metadata
