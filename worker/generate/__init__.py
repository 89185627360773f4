"""Generate functions: what turns a prompt into a trajectory."""

from .finish import finish
from .loader import BUILT_IN, resolve_generate
from .multi_turn import multi_turn
from .single_turn import single_turn

__all__ = ["BUILT_IN", "finish", "multi_turn", "resolve_generate", "single_turn"]
