"""What may be shown of a configuration value: everything but secrets.

Owns the one rule of masking. Never changes a value in use. Invariant: no password leaves through a
page, a log line or an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from rollstream.urls import shown_url


def mask(value: Any) -> Any:
    """Return `value` fit to be shown: passwords become `***`, types become plain ones."""
    if isinstance(value, SecretStr):
        secret = value.get_secret_value()
        return shown_url(secret) if "://" in secret else "***" if secret else ""
    if isinstance(value, str):
        return shown_url(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): mask(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [mask(v) for v in value]
    return value
