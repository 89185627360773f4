"""Environments: what answers the model in place of tools, and judges each of its turns."""

from .life import Environments
from .types import Env, EnvSample, Factory, Observation, StepResult

__all__ = [
    "Env", "EnvSample", "Environments", "Factory", "Observation", "StepResult",
]  # fmt: skip
