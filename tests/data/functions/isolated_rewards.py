"""Rewards of a user that run in the verifier."""

from __future__ import annotations

import os
import signal
from typing import Any


def length(given: dict[str, Any]) -> dict[str, Any]:
    return {
        "length": len(given["response"]),
        "level": given["metadata"]["level"],
        "label": given["label"],
    }


def breaks(given: dict[str, Any]) -> float:
    if given["response"] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("boom")


def unlisted(given: dict[str, Any]) -> float:
    return 1.0
