"""Case 169 of the reference: what the trainer's rows say of samples that are one rollout."""

from __future__ import annotations

import pytest

from rollstream.batch import Batch
from rollstream.errors import Status
from rollstream.group import FinishedGroup, judge_member
from rollstream.sample import Sample
from rollstream.wire import decode_header, encode_header
from tests.builders import a_sample


def leaf(member: int, ids: tuple[int, ...], reward: float = 1.0) -> Sample:
    """Return one leaf of a member of group 0."""
    return a_sample(0, member, turns=[(ids, ())], reward=reward)


def test_169_siblings_share_their_rollout_id_whatever_the_fan_out() -> None:
    siblings = [leaf(1, (4, 5)), leaf(1, (6, 7, 8))]
    group = FinishedGroup(0, "default", [leaf(0, (4,)), siblings, leaf(3, (9,))])
    arrays = Batch([group]).to_arrays()
    assert arrays["rollout_id"].tolist() == [0, 1, 1, 3]
    assert arrays["rollout_mask_sum"].tolist() == [1, 5, 5, 1]


@pytest.mark.parametrize(("second", "usable"), [(1.0, True), (0.5, False)])
def test_169_siblings_of_different_rewards_are_no_verdict(second: float, usable: bool) -> None:
    siblings = [leaf(1, (4, 5)), leaf(1, (6,), reward=second)]
    header = decode_header(encode_header(siblings, num_turns=2, done_unix_s=0.0))
    view = judge_member(1, header, None)
    assert view.usable is usable
    if view.missing is not None:
        assert (view.missing.status, view.missing.reason, view.missing.error) == (
            Status.FAILED, "reward_error", "leaves of one trajectory have different rewards",
        )  # fmt: skip
