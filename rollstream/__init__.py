"""Rollstream: a rollout service for reinforcement learning of language models.

What producer, worker and trainer share. Imports nothing beyond redis, msgpack and numpy.
"""

from rollstream.group import FinishedGroup, GroupView, PromptGroup
from rollstream.sample import Call, Sample

__all__ = ["Call", "FinishedGroup", "GroupView", "PromptGroup", "Sample"]
__version__ = "0.1.0"
