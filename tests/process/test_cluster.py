"""Three nodes over a store in a folder: owners are killed, frozen and stopped; nothing that was answered is lost."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from click.testing import CliRunner

import postdate
from benchmarks.processes import free_ports
from broker.cli import main
from broker.cluster.creation import create_cluster
from broker.cluster.file_store import FileStore
from postdate_api.v1 import admin_pb2, admin_pb2_grpc, message_pb2, producer_pb2, producer_pb2_grpc
from tests.certificates import Authority, Pair, credentials_of
from tests.depth import at_depth
from tests.process.conftest import LIMIT_SECONDS, SMALL, BrokerProcess, Start
from tests.process.load import TOPIC, UNDER_WAY, Load, run_for
from tests.process.test_crash import StreamCut, settle
from tests.wire.access_files import Files

LEASE_MS = 3_000
MOVE_LEASE_MS = 8_000
"""Lease where a shard is moved: a disk that stalls for longer gives it to the first in rank, not to the node named."""
OWNER_SECONDS = 60.0
"""Three processes start at once, and the machine may be busy."""
ROUNDS = at_depth(change=1, deep=10)
PAUSE_MS = at_depth(change=200, deep=4)


def when(process: BrokerProcess, message: str) -> float:
    """Return the time at which a process logged a sentence."""
    return datetime.fromisoformat(process.logged(message)["time"]).timestamp()


class Trio:
    """The processes of three nodes, by name."""

    def __init__(
        self,
        start: Start,
        folder: Path,
        settings_of: Callable[[str], dict[str, str]] = lambda name: {},
        *,
        lease_ms: int = LEASE_MS,
    ) -> None:
        """`settings_of` has what a node has besides, by its name."""
        self._start = start
        self._folder = folder
        self._settings_of = settings_of
        self._lease_ms = lease_ms
        self._ports = dict(zip("abc", free_ports(3), strict=True))
        self.processes: dict[str, BrokerProcess] = {}
        self.older: set[str] = set()
        """Nodes of an older version, from their next start on."""

    def address(self, name: str) -> str:
        return f"127.0.0.1:{self._ports[name]}"

    async def create(self) -> None:
        (self._folder / "store").mkdir()
        await create_cluster(FileStore(str(self._folder / "store")), 1, self._lease_ms)
        for name in self._ports:
            await self.start_node(name)

    async def start_node(self, name: str) -> None:
        self.processes[name] = await self._start(
            module="tests.older_broker" if name in self.older else "",
            data_dir=str(self._folder / name),
            grpc_address=f"127.0.0.1:{self._ports[name]}",
            cluster_store=f"file://{self._folder}/store",
            cluster_nodes=",".join(f"{node}=127.0.0.1:{port}" for node, port in self._ports.items()),
            node=name,
            base_interval_ms="3s",
            **SMALL,
            **self._settings_of(name),
        )

    async def owner(self) -> tuple[str, BrokerProcess]:
        """Wait until a node serves."""
        end = time.monotonic() + OWNER_SECONDS
        while True:
            for name, process in tuple(self.processes.items()):
                if process.process.returncode is not None:
                    await self._restart(name)
                elif process.grpc_address:
                    return name, process
            assert time.monotonic() < end, self.lines()
            await asyncio.sleep(0.02)

    async def _restart(self, name: str) -> None:
        """Start a node anew, as its supervisor does. On a busy machine one may be starved of its lease."""
        assert await self.processes[name].wait() == 1, self.lines()
        assert self.processes[name].logged("Another node owns the shard now")
        await self.start_node(name)

    async def loaded_owner(self, load: Load) -> tuple[str, BrokerProcess, list[asyncio.Task[None]]]:
        """Load whoever serves, and return when that one is at work."""
        while True:
            load.begin_life()
            name, owner = await self.owner()
            try:
                return name, owner, await run_for(owner, load, 0.3 * load.rng.random())
            except TimeoutError:
                if owner.process.returncode is None:
                    raise

    async def settle(self, load: Load) -> None:
        """Consume, from whoever serves, until nothing is missing."""
        end = time.monotonic() + OWNER_SECONDS
        while True:
            load.begin_life()
            _, owner = await self.owner()
            try:
                await settle(load, owner)
            except StreamCut:
                assert time.monotonic() < end, self.lines()
                await asyncio.sleep(0.1)
            except AssertionError:
                if owner.process.returncode is None:
                    raise
            else:
                return

    async def figures(self, name: str, sentence: str) -> dict[str, float]:
        """Return the metrics of a node, at the port that it named in a sentence of its log."""
        http = self.processes[name].logged(sentence)["http"]
        async with aiohttp.ClientSession() as session:
            text = await (await session.get(f"http://{http}/metrics")).text()
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {key: float(value) for key, value in rows}

    def lines(self) -> str:
        """Return the logs of all nodes."""
        return "\n".join(line for process in self.processes.values() for line in process.lines)

    async def following(self, name: str) -> None:
        """Wait until a node follows."""
        async with asyncio.timeout(LIMIT_SECONDS):
            while not any('"Following"' in line for line in self.processes[name].lines):
                await asyncio.sleep(0.02)


@pytest.mark.slow
async def test_nothing_is_lost_early_or_back_whatever_becomes_of_owners(start: Start, tmp_path: Path) -> None:
    trio = Trio(start, tmp_path)
    await trio.create()
    load = Load(seed=15, pause_ms=PAUSE_MS)
    for _ in range(ROUNDS):
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
            name, owner, tasks = await trio.loaded_owner(load)
            owner.process.send_signal(number)
            del trio.processes[name]
            if number is not signal.SIGSTOP:
                status = await owner.wait()
                assert (status == 0) == (number is signal.SIGTERM), owner.lines
            _, next_owner = await trio.owner()
            if number is signal.SIGTERM:
                gap = when(next_owner, "Taking over") - when(owner, "Stopped")
                assert gap < LEASE_MS / 1e3, "whoever is named does not wait for the lease"
            if number is signal.SIGSTOP:
                owner.process.send_signal(signal.SIGCONT)
                assert await owner.wait() == 1
                assert owner.logged("Another node owns the shard now")
                assert not any("disk" in line for line in owner.lines), "no disk has failed"
            await asyncio.gather(*tasks)
            assert not load.violations, load.violations[:5]
            await trio.start_node(name)
            await trio.following(name)
    await trio.settle(load)
    assert not load.violations, load.violations[:5]
    assert len(load.answered) >= 3 * ROUNDS * UNDER_WAY
    assert all(load.confirmed.values())


async def test_what_has_not_come_from_a_stream_that_was_cut_is_not_called_lost() -> None:
    load = Load(seed=1)
    load.answered[1, 1] = b"1.0"

    async def cut(broker: BrokerProcess, name: str, *, polite: bool = True) -> None:
        """Answer as an owner without its lease."""

    load.consume = cut  # type: ignore[method-assign]
    with pytest.raises(StreamCut):
        await settle(load, object())


@pytest.mark.slow
async def test_any_node_takes_calls_and_an_owner_without_its_store_says_nothing(
    start: Start, tmp_path: Path
) -> None:
    trio = Trio(start, tmp_path)
    await trio.create()
    name, owner = await trio.owner()
    for node in "abc":
        await trio.following(node)
    standby = next(node for node in "abc" if node != name)
    http = f"http://{trio.processes[standby].logged('Standing by')['http']}"
    async with aiohttp.ClientSession() as session:
        assert (await (await session.get(f"{http}/readyz")).text()).startswith("standby")
        metrics = await (await session.get(f"{http}/metrics")).text()
    assert 'postdate_role{role="standby"} 1.0' in metrics
    async with grpc.aio.insecure_channel(trio.address(standby)) as channel:
        request = producer_pb2.ProduceRequest(topic=TOPIC, messages=[message_pb2.Message(payload=b"1")])
        produce = producer_pb2_grpc.ProducerServiceStub(channel).Produce
        await until_answered(lambda: produce(request, timeout=5))
        view = await admin_pb2_grpc.AdminServiceStub(channel).GetCluster(admin_pb2.GetClusterRequest())
        assert view.shards[0].owner == name and view.shards[0].owner_address == trio.address(name)
    async with aiohttp.ClientSession() as session:
        page = await session.get(f"{http}/topics")
        assert page.status == 503 and f"those of the owner are on node {name}, 127.0.0.1" in await page.text()
        page = await session.get(f"{http}/cluster")
        assert page.status == 200 and f"Node {name} owns the shard" in await page.text()
    topic = admin_pb2.GetTopicRequest(name=TOPIC)
    stub = admin_pb2_grpc.AdminServiceStub(owner.channel)
    await stub.GetTopic(topic)
    (tmp_path / "store").rename(tmp_path / "away")
    refusal = await until_refused(lambda: stub.GetTopic(topic))
    assert refusal.code() is grpc.StatusCode.UNAVAILABLE and "object store" in (refusal.details() or "")
    told = (await stub.GetCluster(admin_pb2.GetClusterRequest())).shards[0]
    assert (told.owner, told.owner_address) == ("", ""), (
        "clients would come to it for as long as it is cut off"
    )
    http = f"http://{owner.logged('Serving')['http']}"
    async with aiohttp.ClientSession() as session:
        page = await session.get(f"{http}/cluster")
        assert page.status == 200 and "owner without a lease" in await page.text()
        assert (await session.get(f"{http}/topics")).status == 503
    (tmp_path / "away").rename(tmp_path / "store")
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            _, owner = await trio.owner()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await admin_pb2_grpc.AdminServiceStub(owner.channel).GetTopic(topic, timeout=5)
                break
            await asyncio.sleep(0.1)


@pytest.mark.slow
async def test_a_shard_is_moved_to_the_node_that_is_named_and_back(start: Start, tmp_path: Path) -> None:
    """To the last in rank, and from there to the first owner, which comes back without a rest."""
    trio = Trio(start, tmp_path, lease_ms=MOVE_LEASE_MS)
    await trio.create()
    for node in trio.processes:
        await trio.following(node)
    load = Load(seed=16, pause_ms=PAUSE_MS)
    first = ""
    for move in range(2):
        name, owner, tasks = await trio.loaded_owner(load)
        stub: Any = admin_pb2_grpc.AdminServiceStub(owner.channel)
        (shard,) = (await stub.GetCluster(admin_pb2.GetClusterRequest(), timeout=LIMIT_SECONDS)).shards
        to = first if move else shard.standbys[-1]
        first = first or name
        through = next(node for node in trio.processes if node != name)
        for node, role in ((name, "owner"), (through, "standby")):
            figures = await trio.figures(node, "Serving" if node == name else "Standing by")
            assert figures[f'postdate_role{{role="{role}"}}'] == 1 and figures["postdate_epoch"] == move + 1
            assert (figures["postdate_lease_seconds_left"] > 0) == (node == name)
            assert figures["postdate_log_bytes"] > 0 < figures["postdate_take_overs_total"]
        command = ["cluster", "move", "--address", trio.address(through), "--to", to]
        moved = await asyncio.to_thread(CliRunner().invoke, main, command)
        assert moved.exit_code == 0, f"{moved.output}\n{trio.lines()}"
        assert await owner.wait() == 1 and owner.logged("The shard was handed over"), owner.lines
        del trio.processes[name]
        new_name, new_owner = await trio.owner()
        assert new_name == to
        gap = when(new_owner, "Taking over") - when(owner, "Stopped")
        assert gap < MOVE_LEASE_MS / 1e3, "whoever is named does not wait for the lease"
        await asyncio.gather(*tasks)
        assert not load.violations, load.violations[:5]
        await trio.start_node(name)
        await trio.following(name)
        assert not (tmp_path / name / "shards" / "0.rest").exists(), "it was not fenced, and does not rest"
    await trio.settle(load)
    assert not load.violations, load.violations[:5]
    assert all(load.confirmed.values())


@pytest.mark.deep
async def test_nodes_are_upgraded_one_after_the_other_under_load_and_the_owner_last(
    start: Start, tmp_path: Path
) -> None:
    """The way back is open until something is decided that the older version does not know; that stops standbys only."""
    trio = Trio(start, tmp_path, lease_ms=MOVE_LEASE_MS)
    trio.older = set("abc")
    await trio.create()
    load = Load(seed=17)

    async def move(to: str) -> str:
        """Hand the shard over under load; the former owner begins anew in its version."""
        name, owner, tasks = await trio.loaded_owner(load)
        command = ["cluster", "move", "--address", trio.address(name), "--to", to]
        moved = await asyncio.to_thread(CliRunner().invoke, main, command)
        assert moved.exit_code == 0, f"{moved.output}\n{trio.lines()}"
        assert await owner.wait() == 1
        del trio.processes[name]
        await asyncio.gather(*tasks)
        await trio.start_node(name)
        await trio.following(name)
        return name

    async def upgrade(name: str) -> None:
        trio.older.remove(name)
        process = trio.processes.pop(name)
        if process.process.returncode is None:
            process.process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
        await trio.start_node(name)
        await trio.following(name)

    for node in trio.processes:
        await trio.following(node)
    first, _ = await trio.owner()
    upgraded, older = (node for node in "abc" if node != first)
    await upgrade(upgraded)
    await move(upgraded)
    await move(older)
    await move(upgraded)
    name, owner, tasks = await trio.loaded_owner(load)
    assert name == upgraded
    stub: Any = admin_pb2_grpc.AdminServiceStub(owner.channel)
    await stub.Pause(admin_pb2.PauseRequest(topic=TOPIC, subscription="half"), timeout=LIMIT_SECONDS)
    await stub.Resume(admin_pb2.ResumeRequest(topic=TOPIC, subscription="half"), timeout=LIMIT_SECONDS)
    for node in (first, older):
        assert await trio.processes[node].wait() == 1
        assert "a newer version wrote it" in trio.processes[node].lines[-1]
        await upgrade(node)
    await load.under_way()
    assert owner.process.returncode is None, "what standbys do not know stops no owner"
    assert await move(first) == upgraded
    await asyncio.gather(*tasks)
    await trio.settle(load)
    assert not load.violations, load.violations[:5]
    assert all(load.confirmed.values())


@pytest.mark.deep
async def test_nodes_prove_themselves_to_each_other_and_to_clients_by_certificates(
    start: Start, tmp_path: Path
) -> None:
    """Each node has a certificate of its own, and all have one authority, which everybody needs."""
    files, authority = Files(tmp_path), Authority(tmp_path)
    files.access(
        '[[grant]]\nprincipals = ["token:admin", "cert:shop"]\ntopics = ["*"]\nrights = ["produce", "manage"]\n'
    )
    pairs = {name: authority.issue(name, common_name=f"node-{name}", is_local=True) for name in "abc"}
    own = authority.issue("shop", common_name="shop")

    def settings_of(name: str) -> dict[str, str]:
        pair, kept = pairs[name], ("access_file", "tokens_file")
        return {
            **{each: files.settings[each] for each in kept},
            "tls_cert_file": pair.cert_file,
            "tls_key_file": pair.key_file,
            "tls_client_ca_file": authority.ca_file,
        }

    trio = Trio(start, tmp_path, settings_of)
    await trio.create()
    name, owner = await trio.owner()
    for node in trio.processes:
        await trio.following(node)
    standby = next(node for node in trio.processes if node != name)
    token_file = tmp_path / "admin.token"
    token_file.write_text("admin-secret")
    with_token = ["--tls-cert", own.cert_file, "--tls-key", own.key_file, "--token-file", str(token_file)]
    connection = ["--address", trio.address(standby), "--tls-ca", authority.ca_file, *with_token]

    async def run(*command: str) -> str:
        done = await asyncio.to_thread(CliRunner().invoke, main, [*command, *connection])
        assert done.exit_code == 0, (done.output, trio.lines())
        return done.output

    await pass_on(trio.address(standby), authority, own)
    tls = postdate.Tls(ca_file=authority.ca_file, cert_file=own.cert_file, key_file=own.key_file)
    addresses = ",".join(map(trio.address, trio.processes))
    async with postdate.connect(addresses, tls=tls) as client, client.producer(TOPIC) as producer:
        await producer.send(b"by the right of a certificate, of the owner itself")
        assert f"owner {name}, epoch " in await run("cluster", "status")
        await run("cluster", "move", "--to", standby)
        assert await owner.wait() == 1
        await producer.send(b"of the next owner")
    other = next(node for node in trio.processes if node not in (name, standby))
    await pass_on(trio.address(other), authority, own)


async def pass_on(address: str, authority: Authority, pair: Pair) -> None:
    """See a standby pass on what comes with a token, and nothing else."""
    credentials = credentials_of(pair, authority)
    request = producer_pb2.ProduceRequest(topic=TOPIC, messages=[message_pb2.Message(payload=b"1")])
    async with grpc.aio.secure_channel(address, credentials) as channel:
        produce = producer_pb2_grpc.ProducerServiceStub(channel).Produce
        token = [("authorization", "Bearer admin-secret")]
        await until_answered(lambda: produce(request, timeout=5, metadata=token))
        refusal = await until_refused(lambda: produce(request, timeout=5))
        assert "does not own the shard; its owner is at" in (refusal.details() or "")


async def until_answered(call: Callable[[], Awaitable[Any]]) -> None:
    """Repeat a call until it is answered."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call()
                return
            await asyncio.sleep(0.1)


async def until_refused(call: Callable[[], Awaitable[Any]]) -> grpc.aio.AioRpcError:
    """Repeat a call until it is refused."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            try:
                await call()
            except grpc.aio.AioRpcError as error:
                return error
            await asyncio.sleep(0.1)
