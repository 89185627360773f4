"""Every chat format that can be named, in one table.

Owns the table. Never imports a renderer: a family is data until somebody asks for it.
Invariant: names are unique, and each is what `model.renderer` takes.
"""

from __future__ import annotations

from .deepseek import DEEPSEEK
from .family import CallForm, Family, Proof
from .glm import GLM
from .gpt_oss import GPT_OSS
from .kimi import KIMI
from .llama import LLAMA
from .minimax import MINIMAX
from .nemotron import NEMOTRON
from .qwen import QWEN

FAMILIES: dict[str, Family] = {
    **QWEN,
    **DEEPSEEK,
    **GLM,
    **GPT_OSS,
    **KIMI,
    **LLAMA,
    **MINIMAX,
    **NEMOTRON,
}
"""Names of `model.renderer`."""

__all__ = ["FAMILIES", "CallForm", "Family", "Proof"]
