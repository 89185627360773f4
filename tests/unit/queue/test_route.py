"""Which server connections go to next, after each thing that servers and sentinels say."""

from __future__ import annotations

import pytest
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)

from rollstream.queue.route import Route, is_elsewhere

SEED, OTHER = ("seed", 6379), ("other", 7000)


@pytest.mark.parametrize(
    "error",
    [
        ReadOnlyError("You can't write against a read only replica."),
        MovedError("7 other:7000"),
        AskError("7 other:7000"),
        ClusterDownError("The cluster is down"),
        ResponseError("UNBLOCKED force unblock from blocking operation, instance state changed"),
        ResponseError("ERR Error running script: @user_script: 7: -READONLY You can't write"),
    ],
)
def test_a_server_that_is_not_the_one_to_ask_is_told_apart(error: ResponseError) -> None:
    assert is_elsewhere(error)


@pytest.mark.parametrize(
    "error", [OutOfMemoryError("command not allowed"), ResponseError("WRONGTYPE x READONLY y")]
)
def test_other_refusals_are_about_the_command(error: ResponseError) -> None:
    assert not is_elsewhere(error)


def test_a_replica_makes_every_earlier_connection_old_and_keeps_the_address() -> None:
    route = Route([SEED])
    route.refused(ReadOnlyError("no"), SEED, 0)
    assert (route.generation, route.address) == (1, SEED)
    # Ten connections hear it at once: one new generation, or they would chase each other.
    route.refused(ReadOnlyError("no"), SEED, 0)
    assert route.generation == 1


def test_moved_leads_to_the_owner_and_to_nobody_where_it_was_said_long_ago() -> None:
    route = Route([SEED])
    route.refused(MovedError("7 other:7000"), SEED, 0)
    assert (route.address, route.is_cluster, route.wants_nodes) == (OTHER, True, True)
    route.refused(MovedError("7 stale:1"), SEED, 0)
    assert route.address == OTHER
    route.refused(MovedError("7 :7001"), OTHER, 1)  # an empty host is the one that answered
    assert route.address == ("other", 7001)


@pytest.mark.parametrize("error", [AskError("7 other:7000"), ClusterDownError("down")])
def test_a_slot_on_the_move_is_waited_for_where_it_is(error: ResponseError) -> None:
    route = Route([SEED])
    route.refused(error, SEED, 0)
    assert (route.address, route.generation, route.is_cluster) == (SEED, 0, False)


def test_an_owner_that_is_gone_is_asked_for_at_every_other_node_in_turn() -> None:
    route = Route([SEED])
    route.refused(MovedError("7 other:7000"), SEED, 0)
    route.learned([
        [0, 100, [b"other", 7000, b"id"], [b"replica", 7001, b"id"]],
        [101, 200, [b"", 7002, b"id"]],
    ])  # fmt: skip
    assert route.nodes == [OTHER, ("replica", 7001), ("other", 7002)]
    assert not route.wants_nodes
    asked = set()
    for _ in range(8):
        gone = route.address
        route.unreachable(gone)
        assert route.address != gone
        assert not route.settled
        asked.add(route.address)
    assert asked >= {SEED, ("replica", 7001), ("other", 7002)}


def test_a_server_on_its_own_that_is_gone_is_tried_again() -> None:
    route = Route([SEED])
    route.unreachable(SEED)
    assert (route.address, route.generation) == (SEED, 0)


def test_another_master_makes_connections_old_and_the_same_one_does_not() -> None:
    route = Route([])
    route.found(SEED)
    before = route.generation
    route.found(SEED)
    assert route.generation == before
    route.found(OTHER)
    assert (route.generation, route.address) == (before + 1, OTHER)


def test_a_unix_socket_has_no_address_and_nobody_to_ask() -> None:
    route = Route([])
    assert (route.address, route.settled) == (None, True)
