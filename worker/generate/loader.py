"""Generate functions by name.

Owns the list of built-in ones. Never calls one. Invariant: what is returned is `async def` and
takes one `GenerateInput`, or start-up fails with one clear error.
"""

from __future__ import annotations

from ..functions import is_path, resolve, unknown_name
from ..types import GenerateFunction
from .multi_turn import multi_turn
from .single_turn import single_turn

BUILT_IN: dict[str, GenerateFunction] = {"single_turn": single_turn, "multi_turn": multi_turn}
AGENT, ENV = "agent", "env"
"""Built-in ones that are made per environment: one needs a gateway (`process.agents`), the other
what answers the model (`process.environments`)."""


def resolve_generate(path: str) -> GenerateFunction:
    """Return the generate function that the configuration names.

    Args:
        path: `single_turn`, `multi_turn`, `pkg.module:name` or `PATH.py:name`; not `agent`
            and `env`.

    Raises:
        ConfigError: with the path, what failed and what to do.
    """
    if not is_path(path):
        if path not in BUILT_IN:
            raise unknown_name(path, "generate function", sorted([*BUILT_IN, AGENT, ENV]))
        return BUILT_IN[path]
    function: GenerateFunction = resolve(path, "generate function", kind="async", num_args=1)
    return function
