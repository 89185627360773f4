"""What a server's refusals become for callers, by its own words."""

from __future__ import annotations

import pytest
from redis import exceptions

from rollstream.queue.connection import raise_first

WRAPPED = (
    "Error running script (call to f_0a): @user_script:22: @user_script: 22: -{} by its own words"
)
"""How Redis 6.2 tells of what a script met."""


@pytest.mark.parametrize("word", ["BUSY", "MISCONF", "NOREPLICAS", "TRYAGAIN"])
@pytest.mark.parametrize("form", ["{} in its words", WRAPPED])
def test_refusal_that_passes_is_an_outage_wrapped_or_not(word: str, form: str) -> None:
    with pytest.raises(exceptions.ConnectionError, match=word):
        raise_first([b"fine", exceptions.ResponseError(form.format(word))])


def test_refusal_of_the_command_itself_is_raised_as_it_is() -> None:
    refused = exceptions.ResponseError("WRONGTYPE rs:{busy}:q is BUSY with another program")
    with pytest.raises(exceptions.ResponseError) as raised:
        raise_first([refused])
    assert raised.value is refused
