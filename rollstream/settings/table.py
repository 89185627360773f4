"""What all tables of the configuration have in common.

Owns strictness and the checks that several tables share. Never a key. Invariant: a table is frozen,
and an unknown key is an error.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, SecretStr

from rollstream.urls import redis_url_problem


class Table(BaseModel):
    """A table of the configuration: frozen, and strict about its keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def checked_url(value: SecretStr) -> SecretStr:
    """Return the URL of a Redis, or raise `ValueError` with what is expected."""
    if problem := redis_url_problem(value.get_secret_value()):
        raise ValueError(problem)
    return value
