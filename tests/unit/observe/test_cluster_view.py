"""A shard as a node knows it that has asked others."""

from __future__ import annotations

from broker.observe.cluster_view import ClusterView, NodeProgress, OwnerRoute, add_progress, merge_views

NODES = (("a", "10.0.0.1:7650"), ("b", "10.0.0.2:7650"), ("c", "10.0.0.3:7650"))


def view(node: str, epoch: int = 0, owner: str = "", **facts: object) -> ClusterView:
    known = ClusterView(
        "k", node, NODES, 0, OwnerRoute(epoch, owner, dict(NODES).get(owner, "")), ("c", "a", "b")
    )
    return known._replace(**facts)  # type: ignore[arg-type]


def owner_by(own: ClusterView, *others: ClusterView) -> tuple[int, str]:
    route = merge_views(own, others).route
    assert route.owner_address == dict(NODES).get(route.owner_node, "")
    return route.epoch, route.owner_node


def test_the_highest_epoch_is_right_and_an_owner_more_than_none() -> None:
    assert owner_by(view("a", 3, "b")) == (3, "b")
    assert owner_by(view("a", 3, "b"), view("b", 4, "c"), view("c", 2, "a")) == (4, "c")
    assert owner_by(view("a", 3, "b"), view("b", 4)) == (4, ""), "whoever was it is it no more"
    assert owner_by(view("a", 3), view("b", 3, "b")) == (3, "b")
    assert owner_by(view("a", 0), view("b", 0)) == (0, "")


def test_what_others_say_of_this_node_does_not_make_it_the_owner() -> None:
    assert owner_by(view("a", 3, "b"), view("b", 4, "a")) == (4, "")
    assert owner_by(view("a", 4, "a"), view("b", 4, "a")) == (4, "a"), "it says so itself"


def test_an_address_is_that_of_this_nodes_list_and_strangers_own_nothing() -> None:
    elsewhere = view("b")._replace(route=OwnerRoute(4, "c", "10.9.9.9:1"))
    assert merge_views(view("a", 3, "b"), [elsewhere]).route == OwnerRoute(4, "c", "10.0.0.3:7650")
    stranger = view("b")._replace(route=OwnerRoute(4, "z", "10.9.9.9:1"))
    assert owner_by(view("a", 3, "b"), stranger) == (4, "")


def test_standbys_are_all_but_the_owner_in_their_order_and_the_newest_base_is_known() -> None:
    merged = merge_views(
        view("a", base_lsn=5, base_time_ms=50), [view("b", 1, "c", base_lsn=7, base_time_ms=60)]
    )
    assert merged.standbys == ("a", "b")
    assert (merged.base_lsn, merged.base_time_ms) == (7, 60)


def test_each_node_tells_how_far_it_is_itself() -> None:
    own = view("b", progress=(NodeProgress("b", 9, 1, 20),))
    other = view("c", progress=(NodeProgress("c", 10), NodeProgress("b", 2, 8, 900)))
    assert add_progress(own, [other]).progress == (NodeProgress("b", 9, 1, 20), NodeProgress("c", 10))
    assert merge_views(own, [other]).progress == add_progress(own, [other]).progress
