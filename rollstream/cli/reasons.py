"""What each reason of a drop means, and which setting decides it: one sentence each.

Owns these sentences. Never decides one of them. Invariant: every reason of the closed list has one
(a test holds it to that).
"""

from __future__ import annotations

from rollstream.errors import DropReason

MEANS: dict[str, str] = {
    DropReason.ZERO_STD: "the rewards of its members do not differ, so it teaches nothing "
    "(aggregator.filters: reward_nonzero_std)",
    DropReason.NO_ABORTED: "a member was aborted (aggregator.filters: no_aborted)",
    DropReason.RANGE: "its mean reward is out of bounds (aggregator.filters: reward_range)",
    DropReason.MIN_OK: "too few members completed (aggregator.filters: min_ok)",
    DropReason.LENGTH: "a response is too long or too short (aggregator.filters: length)",
    DropReason.CUSTOM: "a filter of yours dropped it, or its records could not be read",
    DropReason.SHORT_GROUP: "too few members can be trained on (aggregator.min_samples)",
    DropReason.STALE: "it began with weights that are too old by now (weights.max_staleness, "
    "weights.on_stale)",
    DropReason.WITHDRAWN: "somebody took it back: rollstream withdraw, its trainer or producer, or "
    "a rewind",
    DropReason.DEADLINE: "members did not end within the group's time (aggregator.group_timeout_s, "
    "or the row's own)",
    DropReason.FILTER_ERROR: "a filter broke, or did not answer (aggregator.filters)",
    DropReason.TOO_LARGE: "results were larger than worker.max_body_bytes",
    DropReason.SEEN: "the trainer's checkpoint counts it as trained on already",
    DropReason.RUN_ABORTED: "the run was aborted while it lived",
}
