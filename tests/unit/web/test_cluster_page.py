"""The page of the cluster, on an owner and on standbys; and what else a standby answers."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest

from broker.config import BrokerConfig
from broker.observe.audit_trail import AuditTrail
from broker.observe.cluster_view import ClusterView, NodeProgress, OwnerRoute
from broker.observe.metrics import BrokerCounters, ClusterSnapshot
from broker.rpc.front import Front, FrontHost
from broker.runtime.clock import SystemClock
from broker.web.cluster import node_rows
from broker.web.server import HttpServer
from broker.web.source import ClusterSource, PageSource, point_to_owner
from tests.configs import broker_config
from tests.unit.owners import HeldOwner
from tests.unit.web.conftest import TOKEN, MakePages, access_files
from tests.unit.web.test_page_audit import trail
from tests.unit.web.test_pages import NASTY

ADDRESSES = (("a", "10.0.0.1:7650"), ("b", "10.0.0.2:7650"), ("c", "10.0.0.3:7650"))
FOLLOWING = ClusterSnapshot(False, 7, 0.0, 12, 3.4, 60.0, 5, 6 << 20, -0.07)
OWNING = ClusterSnapshot(True, 7, 3.2, 0, 0.0, 60.0, 5, 6 << 20, 0.0)


def view_of(node: str, owner: str) -> ClusterView:
    standbys = tuple(name for name in "cab" if name != owner)
    route = OwnerRoute(7, owner, dict(ADDRESSES).get(owner, ""))
    return ClusterView("the-cluster", node, ADDRESSES, 0, route, standbys, 4_321, 1_000_000, 4_000, 900_000)


@dataclass
class Node:
    """A node that a test moves by hand."""

    view: ClusterView = field(default_factory=lambda: view_of("b", "a"))
    snapshot: ClusterSnapshot | None = FOLLOWING
    state: str = "standby, 12 records and 3400 ms behind"

    @property
    def source(self) -> ClusterSource:
        return ClusterSource(lambda: [self.view], lambda: self.snapshot, lambda: self.state)


async def render_metrics() -> bytes:
    return b"postdate_up 1\n"


@asynccontextmanager
async def standby(
    node: Node, source: ClusterSource | None = None, **settings: object
) -> AsyncIterator[aiohttp.ClientSession]:
    """A standby's HTTP edge, and a browser's session with it."""
    config: BrokerConfig = broker_config(http_address="127.0.0.1:0", **settings)
    clock = SystemClock()
    front = Front(FrontHost(config, clock, BrokerCounters()), lambda: node.view)
    calls = front.page_calls()
    pages = PageSource(config, clock, "1.2.3", AuditTrail(clock), calls, cluster=source or node.source)
    server = HttpServer(config.http_address, render_metrics, lambda: None, pages=pages)
    server.listen()
    await server.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(front._port.server.stop, None)
        stack.push_async_callback(server.stop)
        jar = aiohttp.CookieJar(unsafe=True)
        yield await stack.enter_async_context(
            aiohttp.ClientSession(f"http://{server.address}", cookie_jar=jar)
        )


async def text_of(session: aiohttp.ClientSession, path: str, status: int = 200, **headers: str) -> str:
    async with session.get(path, headers=headers, allow_redirects=False) as response:
        assert response.status == status, await response.text()
        return await response.text()


def rows_of(view: ClusterView, snapshot: ClusterSnapshot | None) -> list[tuple[str, bool, str, int]]:
    return [(row.name, row.is_here, row.role, row.turn) for row in node_rows(view, snapshot)]


def test_a_node_tells_of_the_others_what_it_knows_and_no_more() -> None:
    assert rows_of(view_of("b", "a"), FOLLOWING) == [
        ("a", False, "owner", 0),
        ("b", True, "standby", 2),
        ("c", False, "standby", 1),
    ]
    assert rows_of(view_of("b", "").of_standby(), FOLLOWING) == [
        ("a", False, "", 0),
        ("b", True, "standby", 0),
        ("c", False, "", 0),
    ]
    owner = view_of("a", "a")
    others = [("b", False, "standby", 2), ("c", False, "standby", 1)]
    assert rows_of(owner, OWNING) == [("a", True, "owner", 0), *others]
    cut_off = owner._replace(route=OwnerRoute(7))
    assert rows_of(cut_off, OWNING) == [("a", True, "owner without a lease", 0), *others]
    seeding = ClusterView("the-cluster", "b", ADDRESSES, 0, OwnerRoute())
    assert {role for _, _, role, _ in rows_of(seeding, None)} == {""}


def test_a_node_that_owns_nothing_now_does_not_name_itself() -> None:
    assert view_of("b", "b").of_standby().route == OwnerRoute(7)
    assert "on node" not in point_to_owner([view_of("b", "b").of_standby()])
    assert view_of("b", "a").of_standby() == view_of("b", "a")


@pytest.mark.slow
async def test_a_standby_shows_the_cluster_and_points_to_the_owner_for_the_rest() -> None:
    node = Node()
    async with standby(node) as session:
        page = await text_of(session, "/cluster")
        shown = " ".join(page.split())
        for part in ("Node a owns the shard", "10.0.0.3:7650", "12 records, 3.4 s", "6.0 MiB", "lsn 4,321"):
            assert part in shown, part
        assert "behind by 70 ms or more" in shown and "lease left" not in shown and node.state in shown
        assert 'href="/topics"' not in page and 'href="/cluster" aria-current="page"' in page
        for path in ("/", "/topics/t", "/audit/report.html"):
            line = await text_of(session, path, 503)
            assert "those of the owner are on node a, 10.0.0.1<" in line and 'href="/cluster"' in line
        async with session.post("/topics/t") as response:
            assert response.status == 503
        await text_of(session, "/cluster", 421, Host="foreign.example")
        assert "10.0.0.1" not in await text_of(session, "/topics", 421, Host="foreign.example")
        assert await text_of(session, "/metrics") == "postdate_up 1\n"
        node.view = view_of("b", "")
        assert "No owner is known" in await text_of(session, "/cluster")
        assert "nobody is known who owns the shard" in await text_of(session, "/", 503)
        node.view, node.snapshot = ClusterView("the-cluster", "b", ADDRESSES, 0, OwnerRoute()), None
        assert "not known yet" in await text_of(session, "/cluster")


async def test_how_far_other_nodes_are_is_shown_once_they_told() -> None:
    node = Node()
    async with standby(node) as session:
        assert "not known here" in await text_of(session, "/cluster")
        node.view = node.view._replace(progress=(NodeProgress("a", 9), NodeProgress("c", 7, 34, 5_600)))
        shown = await text_of(session, "/cluster")
        assert "34 records, 5.6 s" in shown and "not known here" not in shown


async def test_of_several_shards_each_has_a_row_with_its_owner_and_standbys() -> None:
    progress = (NodeProgress("a", 9), NodeProgress("c", 7, 34, 5_600))
    views = [
        view_of("b", "a")._replace(progress=progress),
        view_of("b", "b")._replace(shard=1, progress=(NodeProgress("b", 77),)),
    ]
    node = Node(snapshot=None, state="ok, owns 1")
    several = replace(node.source, views=lambda: views)
    async with standby(node, source=several) as session:
        shown = " ".join((await text_of(session, "/cluster")).split())
        for part in (
            "All shards have an owner",
            "c: 34 records, 5.6 s",
            "does not answer",
            "lsn 4,000",
            "ok, owns 1",
        ):
            assert part in shown, part
        views[1] = views[1].of_standby()
        shown = await text_of(session, "/cluster")
        assert "1 of 2 shards have an owner" in shown and "nobody is known" in shown
        views[0] = views[0]._replace(nodes=((NASTY, NASTY),), standbys=(NASTY,), node=NASTY, cluster_id=NASTY)
        shown = await text_of(session, "/cluster")
        assert "<script>alert" not in shown and "&lt;script&gt;" in shown


async def test_a_standby_is_known_by_its_configured_names() -> None:
    async with standby(Node(), http_hosts="postdate.example") as session:
        await text_of(session, "/metrics", Host="postdate.example")
        await text_of(session, "/cluster", 403, Host="postdate.example")


@pytest.mark.parametrize("where", ["standby", "owner"])
async def test_names_and_texts_are_escaped(make_pages: MakePages, where: str) -> None:
    turned = NASTY + "\u202e"
    nodes = ((turned, NASTY), ("b", "10.0.0.2:7650"))
    view = ClusterView(NASTY, "b", nodes, 0, OwnerRoute(7, turned, "10.0.0.1:7650"), ("b",), 1, 1, 1, 1)
    node = Node(view, replace(OWNING, is_owner=where == "owner"), NASTY)
    if where == "owner":
        pages = await make_pages(cluster=node.source)
        shown = await pages.get("/cluster")
    else:
        async with standby(node) as session:
            shown = await text_of(session, "/cluster") + await text_of(session, "/", 503)
    assert "<script>alert" not in shown and "&lt;script&gt;" in shown and "{{7*7}}" in shown
    assert "\u202e" not in shown and "\\u202e" in shown


async def test_only_an_owner_in_a_cluster_has_the_page(make_pages: MakePages) -> None:
    pages = await make_pages()
    assert 'href="/cluster"' not in await pages.get("/")
    await pages.get("/cluster", status=404)


async def test_an_owner_shows_its_lease_and_the_page_of_its_cluster_also_without_one(
    make_pages: MakePages,
) -> None:
    node = Node(view_of("a", "a"), OWNING, "serving")
    pages = await make_pages(cluster=node.source)
    assert 'href="/cluster"' in await pages.get("/topics")
    shown = await pages.get("/cluster")
    assert "Node a owns the shard" in shown and "3.2 s" in shown and 'href="/topics"' in shown
    owner = HeldOwner()
    pages.broker.ownership = owner
    csrf = await pages.csrf()
    await pages.post("/topics/t/messages/1:1", csrf=csrf, follow=False, status=303, action="cancel", back="/")
    owner.is_held = False
    node.view = node.view._replace(route=OwnerRoute(7))
    shown = await pages.get("/cluster")
    assert "No owner is known" in shown and "owner without a lease" in shown
    assert 'class="flash' not in shown, "the outcome of a change tells of the state"
    await pages.get("/topics", status=503)
    owner.regain()
    assert 'class="flash failed"' in await pages.get("/topics")


async def test_who_may_read_is_the_same_on_a_standby_as_on_an_owner(tmp_path: Path) -> None:
    node = Node()
    async with standby(node, **access_files(tmp_path)) as session:
        assert "10.0.0.3" not in await text_of(session, "/cluster", 303)
    async with standby(node) as session:
        await text_of(session, "/cluster")
        await text_of(session, "/cluster", 403, **{"X-Forwarded-For": "10.0.0.9"})


async def submit(session: aiohttp.ClientSession, path: str, form_page: str, **form: str) -> str:
    """Send the form of a page as a browser does, and return the page that it leads to."""
    csrf = re.search(r'name="csrf" value="([^"]+)"', await text_of(session, form_page))
    assert csrf is not None
    headers = {"Sec-Fetch-Site": "same-origin"}
    async with session.post(path, data={"csrf": csrf[1], **form}, headers=headers) as response:
        return await response.text()


async def test_somebody_logs_in_on_a_standby_and_out_again(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async with standby(Node(), **access_files(tmp_path)) as session:
        async with session.get("/cluster", allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (303, "/login?next=%2Fcluster")
        await submit(session, "/login", "/login", token="another-token-of-length")
        await text_of(session, "/cluster", 303)
        with caplog.at_level(logging.INFO):
            shown = await submit(session, "/login", "/login", token=TOKEN)
        assert "Node a owns the shard" in shown and "Log out" in shown
        assert trail(caplog)[-1]["principal"] == "token:admin"
        shown = await submit(session, "/logout", "/cluster")
        assert 'name="token"' in shown
