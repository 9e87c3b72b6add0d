"""The way to the owner: which of several answers is believed, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from postdate._routes import Routes
from postdate.errors import PermissionDenied, PostdateError, Unavailable
from postdate_api.v1 import admin_pb2

Answers = dict[str, admin_pb2.GetClusterResponse | PostdateError | None]
ALONE = admin_pb2.GetClusterResponse(shards=[admin_pb2.ClusterShard()])
AWAY = Unavailable("away", code="UNAVAILABLE")


def view(node: str, owner: str, epoch: int, cluster_id: str = "c") -> admin_pb2.GetClusterResponse:
    """An answer; nodes are named as their addresses are."""
    shard = admin_pb2.ClusterShard(epoch=epoch, owner=owner, owner_address=owner)
    nodes = [admin_pb2.ClusterNode(name=name, address=name) for name in ("a", "b", "c")]
    return admin_pb2.GetClusterResponse(cluster_id=cluster_id, shards=[shard], nodes=nodes, node=node)


def routes(
    answers: Mapping[str, admin_pb2.GetClusterResponse | PostdateError | None], *given: str, late: str = ""
) -> Routes:
    """Routes over nodes that answer so; None never does, and one is late."""

    async def ask(address: str) -> admin_pb2.GetClusterResponse:
        answer = answers.get(address, AWAY)
        if answer is None:
            await asyncio.Event().wait()
        if address == late:
            await asyncio.sleep(0.05)
        if isinstance(answer, PostdateError):
            raise answer
        assert answer is not None
        return answer

    return Routes(given or tuple(answers), ask)


async def find(found: Routes) -> tuple[str, int]:
    async with asyncio.timeout(5):
        route = await found.find()
    return route.address, route.epoch


async def test_the_owner_is_believed_before_others_have_answered():
    assert await find(routes({"a": view("a", "a", 3), "b": None})) == ("a", 3)


async def test_what_others_say_counts_when_the_owner_does_not_answer():
    assert await find(routes({"a": None, "b": view("b", "a", 3)})) == ("a", 3)


async def test_hearsay_waits_a_little_for_an_owner_of_a_higher_epoch():
    found = routes({"a": view("a", "b", 3), "b": AWAY, "c": view("c", "c", 4)}, late="c")
    assert await find(found) == ("c", 4)


async def test_the_higher_epoch_is_right():
    assert await find(routes({"a": view("a", "c", 4), "b": view("b", "a", 3), "c": AWAY})) == ("c", 4)


async def test_a_lower_epoch_than_was_seen_is_not_believed():
    found = routes({"a": view("a", "a", 3), "b": AWAY})
    found.epoch = 4
    with pytest.raises(Unavailable, match="no node knows who owns the shard"):
        await find(found)


async def test_once_a_cluster_was_seen_another_one_is_not_believed(caplog: pytest.LogCaptureFixture):
    answers: Answers = {"a": view("a", "a", 3), "b": view("b", "a", 3)}
    found = routes(answers)
    assert await find(found) == ("a", 3)
    answers["b"] = view("b", "b", 7, "another")
    for _ in range(3):
        assert await find(found) == ("a", 3)
    assert not any([await found.has_moved("a", 3) for _ in range(3)])
    assert [record.getMessage() for record in caplog.records] == [
        "b is of cluster another, and this client has seen an owner of cluster c: it is not believed"
    ]


async def test_a_node_that_lost_the_settings_of_its_cluster_is_not_believed(caplog: pytest.LogCaptureFixture):
    answers: Answers = {"a": view("a", "a", 3), "b": view("b", "a", 3)}
    found = routes(answers)
    assert await find(found) == ("a", 3)
    answers |= {"a": ALONE, "b": AWAY}
    for _ in range(3):
        with pytest.raises(Unavailable, match="no node"):
            await find(found)
    answers["b"] = view("b", "b", 4)
    assert await find(found) == ("b", 4)
    assert [record.getMessage() for record in caplog.records] == [
        "a is of no cluster, and this client has seen an owner of cluster c: it is not believed"
    ]
    answers |= {"a": view("a", "a", 5), "b": AWAY}
    assert await find(found) == ("a", 5), "it has its settings again"


async def test_what_a_cluster_without_an_owner_says_binds_nobody():
    answers: Answers = {"a": view("a", "", 0)}
    found = routes(answers)
    with pytest.raises(Unavailable):
        await find(found)
    answers["a"] = view("a", "a", 1, "another")
    assert await find(found) == ("a", 1)


async def test_a_broker_without_a_cluster_owns_all():
    assert await find(routes({"x": ALONE, "y": None})) == ("x", 0)


async def test_nodes_are_learned_from_each_other():
    answers: Answers = {"a": view("a", "b", 3), "b": AWAY, "c": AWAY}
    found = routes(answers, "a")
    assert await find(found) == ("b", 3)
    answers |= {"a": AWAY, "c": view("c", "c", 4)}
    assert await find(found) == ("c", 4)


async def test_a_refusal_that_stays_is_told_first():
    with pytest.raises(PermissionDenied):
        await find(routes({"a": AWAY, "b": PermissionDenied("no")}))
    with pytest.raises(Unavailable, match="no node answers: away"):
        await find(routes({"a": AWAY, "b": AWAY}))


async def test_others_are_asked_in_turn_for_a_later_owner():
    answers = {"a": view("a", "a", 3), "b": view("b", "a", 3), "c": view("c", "a", 3)}
    found = routes(answers)
    await find(found)
    assert not any([await found.has_moved("a", 3) for _ in range(2)])
    answers["b"] = view("b", "b", 4)
    assert sorted([await found.has_moved("a", 3) for _ in range(2)]) == [False, True]


async def test_an_owner_is_left_for_one_whose_epoch_was_heard_of_before_its_name():
    """Of a take-over others hear first that there is one; whoever still waits for the former owner asks again."""
    answers: Answers = {"a": None, "b": view("b", "", 4), "c": view("c", "", 4)}
    found = routes(answers)
    found.learn(("a", "b", "c"), 3)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await found.find()
    assert found.epoch == 4
    answers |= {"b": view("b", "b", 4), "c": view("c", "b", 4)}
    assert await found.has_moved("a", 3)
