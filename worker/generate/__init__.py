"""Generate functions: what turns a prompt into a trajectory."""

from .finish import finish
from .loader import BUILT_IN, resolve_generate
from .multi_turn import multi_turn
from .resumable import is_resumable, resumable
from .rollout import LinearRollout
from .single_turn import single_turn

__all__ = [
    "BUILT_IN", "LinearRollout", "finish", "is_resumable", "multi_turn", "resolve_generate",
    "resumable", "single_turn",
]  # fmt: skip
