"""`cluster status`: what it says of nodes that own, follow, lag and do not answer."""

from __future__ import annotations

from broker.cluster.status import NodeStatus, is_owned, render_status

NOW_MS = 1_000_000
OWNER = NodeStatus("a", "h:1", epoch=7, owner="a", applied_lsn=120, applied_time_ms=NOW_MS)


def lines(*nodes: NodeStatus, cluster_id: str = "c") -> list[str]:
    return list(render_status(cluster_id, nodes, NOW_MS))


def test_an_owner_a_standby_and_a_node_that_is_away():
    standby = NodeStatus(
        "b",
        "h:2",
        epoch=7,
        owner="a",
        applied_lsn=100,
        applied_time_ms=NOW_MS - 1_500,
        base_lsn=50,
        base_time_ms=NOW_MS - 600_000,
    )
    assert lines(OWNER, standby, NodeStatus("c", "h:3", problem="refused")) == [
        "cluster c",
        "owner a, epoch 7",
        "  a  h:1  owner    lsn 120",
        "  b  h:2  standby  lsn 100  20 records, 1.5 s behind",
        "  c  h:3  no answer: refused",
        "newest base: lsn 50, 10 min old",
    ]


def test_each_shard_has_a_table_of_its_own():
    first = NodeStatus("a", "h:1", 0, epoch=2, owner="a", applied_lsn=9, applied_time_ms=NOW_MS)
    second = NodeStatus("a", "h:1", 1, epoch=3, owner="b", applied_lsn=4, applied_time_ms=NOW_MS)
    away = [NodeStatus("b", "h:2", shard, problem="refused") for shard in (0, 1)]
    assert lines(first, second, *away) == [
        "cluster c, 2 shards",
        "shard 0: owner a, epoch 2",
        "  a  h:1  owner    lsn 9",
        "  b  h:2  no answer: refused",
        "  newest base: none yet",
        "shard 1: owner b, epoch 3",
        "  a  h:1  standby  lsn 4",
        "  b  h:2  no answer: refused",
        "  newest base: none yet",
    ]
    assert not is_owned([first, second, *away])
    assert is_owned([first, second, NodeStatus("b", "h:2", 1, epoch=3, owner="b")])


def test_the_higher_epoch_is_right():
    stale = NodeStatus("b", "h:2", epoch=6, owner="b", applied_lsn=100, applied_time_ms=NOW_MS)
    assert lines(stale, OWNER)[1:4] == [
        "owner a, epoch 7",
        "  b  h:2  standby  lsn 100",
        "  a  h:1  owner    lsn 120",
    ]


def test_nobody_is_known():
    node = NodeStatus("b", "h:2", epoch=6, applied_lsn=100)
    assert lines(node)[1:] == [
        "no owner is known; the last epoch was 6",
        "  b  h:2  standby  lsn 100",
        "newest base: none yet",
    ]
    assert lines(NodeStatus("b", "h:2", problem="away"))[1] == "no node answers"


def test_a_broker_without_a_cluster():
    assert lines(cluster_id="") == ["no cluster: one broker, which owns all topics"]
