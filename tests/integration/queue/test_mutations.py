"""A model that nothing breaks proves little: it has to notice scripts without a rule of theirs."""

from __future__ import annotations

import pytest
import redis

from tests.integration.queue.mutation_list import MUTATIONS
from tests.integration.queue.mutations import fits, try_mutation, walk_notices

BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}
SAMPLE = (
    "a token without its call number",
    "verdict not fenced at all",
    "complete keeps the lease",
    "a drop is not terminal",
    "the clock runs through outages",
    "suspects go to q",
    "a give-back is charged",
    "requeue keeps results",
)


def test_every_mutation_has_a_name_of_its_own_and_fits_a_script() -> None:
    assert len(BY_NAME) == len(MUTATIONS) >= 40
    assert [mutation.name for mutation in MUTATIONS if not fits(mutation)] == []


@pytest.mark.parametrize("name", SAMPLE)
def test_walk_notices_a_script_without_its_rule(client: redis.Redis, name: str) -> None:
    assert walk_notices(client, BY_NAME[name], walks=12, steps=300) != ""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [19])
def test_mutation_of_the_list_is_noticed_or_explained(client: redis.Redis, first: int) -> None:
    """One in thirty-two of them; all of them by `python -m tests.integration.queue.mutations`."""
    tried = [try_mutation(client, m, walks=20, steps=300) for m in MUTATIONS[first::32]]
    assert [finding.mutation.name for finding in tried if finding.survived] == []
