"""What labels mean, and what is recorded of tokens that an update made unknown."""

from __future__ import annotations

import pytest

from rollstream.labels import between, is_between
from rollstream.sample import UNKNOWN_VERSION
from worker.engines.protocol.versions import BETWEEN_VERSIONS, VersionMap, recorded


@pytest.mark.parametrize("label", [between(0, 1), between(41, 42), between(7, 7)])
def test_name_of_an_engine_in_an_update_is_no_version_whoever_mapped_it(label: str) -> None:
    versions = VersionMap()
    assert is_between(label)
    assert versions.of(label, 0) == versions.of(label, 42) == BETWEEN_VERSIONS
    assert BETWEEN_VERSIONS < UNKNOWN_VERSION


@pytest.mark.parametrize("label", ["7", "~", "1~", "~1", "v1~2", "1~2 ", "1~2\n", "1~-2", 12, None])
def test_other_labels_are_not_that_name(label: object) -> None:
    assert not is_between(label)


@pytest.mark.parametrize(
    ("spans", "kept"),
    [
        ([(5, 0, 3), (6, 3, 4)], [(5, 0, 3), (6, 3, 4)]),
        ([(-1, 0, 4)], [(-1, 0, 4)]),
        ([(5, 0, 1), (-2, 1, 3), (6, 3, 4)], [(5, 0, 1), (-1, 1, 3), (6, 3, 4)]),
        ([(5, 0, 1), (-2, 1, 4)], [(5, 0, 1), (-1, 1, 4)]),
        ([(-2, 0, 4)], [(5, 0, 0), (-1, 0, 4)]),
        ([(-2, 0, 3), (6, 3, 4)], [(5, 0, 0), (-1, 0, 3), (6, 3, 4)]),
        ([(-1, 0, 2), (-2, 2, 4)], [(5, 0, 0), (-1, 0, 2), (-1, 2, 4)]),
        ([], []),
    ],
)
def test_tokens_of_an_update_are_recorded_as_unknown_and_at_least_of_the_version_at_dispatch(
    spans: list[tuple[int, int, int]], kept: list[tuple[int, int, int]]
) -> None:
    assert recorded(spans, 5) == kept
