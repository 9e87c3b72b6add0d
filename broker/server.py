"""The composition root: builds every part, starts it, drains it, stops it."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from broker.config import SETTINGS, BrokerConfig
from broker.errors import Fenced, Unavailable
from broker.folder.broker import Broker
from broker.folder.checkpoint import TOPICS_AT_ONCE
from broker.folder.scrape import take_snapshot
from broker.observe.cluster_view import ViewCluster
from broker.observe.lateness import LoopLagProbe
from broker.observe.logs import get_logger, set_log_level
from broker.observe.metrics import BrokerCollector, BrokerSnapshot, ClusterSnapshot
from broker.rpc import admin, compaction, consumer, producer, schedule
from broker.rpc.access import AccessInterceptor
from broker.rpc.calls import Handler
from broker.rpc.cluster import encode_view
from broker.rpc.hand_over import HandOver
from broker.rpc.health import HealthService
from broker.rpc.own_calls import OwnCalls
from broker.rpc.page_calls import PageCalls
from broker.rpc.port import GrpcPort
from broker.rpc.reflection import add_reflection
from broker.rpc.shortcut import ShortcutPort
from broker.runtime.clock import Clock, SystemClock
from broker.runtime.descriptors import fit_descriptors, raise_descriptor_limit
from broker.runtime.notify import ServiceNotifier
from broker.runtime.ownership import Ownership
from broker.runtime.scheduling import give_way
from broker.runtime.spare_files import SpareDescriptors
from broker.runtime.steps import StepThread
from broker.runtime.vfs import LocalVfs, Vfs
from broker.settings import UNIX, ConfigError
from broker.web.server import HttpServer
from broker.web.source import ClusterSource, PageSource

log = get_logger(__name__)

_ACCEPTED_APART = (producer.SERVICE, consumer.SERVICE)
"""Services each of whose methods has a queue of its own for calls that have arrived. gRPC takes one call of a queue in
some four rounds of the event loop: a message behind a hundred calls that create topics would wait for all of these."""


SPARE_DESCRIPTORS = 32
"""Kept for files; a checkpoint and the other threads have about as many of their own open at a time."""


def _fitted(config: BrokerConfig, limit: int) -> BrokerConfig:
    """The settings that fit into so many descriptors."""
    fitted, lowered = fit_descriptors(config, limit)
    for setting in lowered:
        log.warning(
            "A setting was lowered to fit the limit of open files (ulimit -n, LimitNOFILE)",
            limit=limit,
            setting=setting,
        )
    return fitted


@cache
def broker_version() -> str:
    try:
        return version("postdate")
    except PackageNotFoundError:
        return "0.0.0+unknown"


class BrokerThreads:
    """The threads of one broker, and the descriptors that are kept for its files."""

    def __init__(self) -> None:
        self._journal = StepThread("journal")
        self._executors = [
            ThreadPoolExecutor(1, name, initializer=give_way) for name in ("files", "reads", "index")
        ]
        # Whoever syncs holds what a commit of the file system, and so the journal's own sync, may wait for.
        self._executors.append(ThreadPoolExecutor(TOPICS_AT_ONCE, "syncs"))
        self._spares = SpareDescriptors(SPARE_DESCRIPTORS)

    def make_broker(
        self,
        config: BrokerConfig,
        clock: Clock,
        on_failure: Callable[[BaseException], None],
        *,
        vfs: Vfs | None = None,
        ownership: Ownership | None = None,
    ) -> Broker:
        return Broker(
            config,
            vfs=vfs or LocalVfs(self._spares),
            clock=clock,
            rng=random.Random(),
            journal_executor=self._journal,
            file_executor=self._executors[0],
            read_executor=self._executors[1],
            index_executor=self._executors[2],
            sync_executor=self._executors[3],
            on_failure=on_failure,
            ownership=ownership,
        )

    def close(self) -> None:
        """End them; the broker has stopped."""
        self._journal.shutdown()
        for executor in self._executors:
            executor.shutdown()
        self._spares.close()


class OwnedShard(NamedTuple):
    """The shard of a cluster that a server serves."""

    ownership: Ownership
    open_broker: Callable[[Broker], Awaitable[None]]
    """Recovers the broker, from the log of the shard."""
    view: ViewCluster
    snapshot: Callable[[], ClusterSnapshot]
    resign_to: Callable[[str], None]
    """Ends this process soon, with a hand-over to a node."""


class Server:
    """One broker on the network."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        notifier: ServiceNotifier | None = None,
        vfs: Vfs | None = None,
        clock: Clock | None = None,
        read_config: Callable[[], BrokerConfig] | None = None,
        shard: OwnedShard | None = None,
    ) -> None:
        """`read_config` reads the settings anew, for SIGHUP; without it only files that they name are.

        `shard`: in a cluster, what this node owns now.
        """
        self._read_config = read_config
        self._given = config
        self._open_files_max = raise_descriptor_limit()
        self.config = config = _fitted(config, self._open_files_max)
        self._notifier = notifier or ServiceNotifier({})
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None
        self._clock = clock or SystemClock()
        self._shard = shard
        self._threads = BrokerThreads()
        ownership = shard.ownership if shard is not None else None
        self.broker = self._threads.make_broker(config, self._clock, self._fail, vfs=vfs, ownership=ownership)
        self._version = broker_version()
        epoch = shard.view().route.epoch if shard is not None else 0
        self._consumer = consumer.ConsumerService(self.broker, epoch)
        cluster = None
        if shard is not None:
            cluster = admin.OwnedCluster(shard.view, HandOver(self.broker, shard.view, shard.resign_to))
        services = (
            (producer.SERVICE, producer.ProducerService(self.broker)),
            (consumer.SERVICE, self._consumer),
            (
                admin.SERVICE,
                admin.AdminService(self.broker, self._version, cluster, lambda: self._port.shard_port),
            ),
            (schedule.SERVICE, schedule.ScheduleService(self.broker)),
            (compaction.SERVICE, compaction.CompactionService(self.broker)),
        )
        self._handlers = {name: service.handlers() for name, service in services}
        self._health = HealthService(self._handlers)
        self._port = GrpcPort(self.broker, broker=self.broker, guard=AccessInterceptor)
        self._add_services()
        self._shortcut = ShortcutPort(config.grpc_socket, self._port.interceptors, self._handler)
        calls = PageCalls(self._port, self._handler, has_tls=bool(config.tls_cert_file))
        pages = PageSource(config, self._clock, self._version, self.broker.audit, calls, self.broker)
        if shard is not None:
            pages = replace(
                pages, cluster=ClusterSource(lambda: [shard.view()], shard.snapshot, self._describe_state)
            )
        collector = BrokerCollector(self._take_snapshot, version=self._version)
        self._http = HttpServer(
            UNIX + config.http_socket if config.http_socket else config.http_address,
            collector.render,
            lambda: self.broker.not_ready_because,
            pages=pages,
            calls=None if config.http_socket else OwnCalls(lambda: self._port.address),
            shard_view=None if shard is None else lambda: encode_view(shard.view()),
            connections_max=config.tuning.http_connections_max,
        )
        self.grpc_address = ""
        self.http_address = ""

    async def run(self) -> int:
        """Serve until a signal or a failure; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self.reload_soon)
        await self.start()
        await self.wait_stop()
        await self.stop()
        return 1 if self._failure is not None else 0

    @property
    def failure(self) -> BaseException | None:
        """Cause of the end of the broker; None: it serves, or was asked to stop."""
        return self._failure

    def request_stop(self) -> None:
        """Have `wait_stop` return."""
        self._stop.set()

    async def wait_stop(self) -> None:
        """Return when the server is to stop, for a request or a failure."""
        await self._stop.wait()

    async def start(self) -> None:
        """Recover, then open the ports. Raises Fenced, Corrupt, ConfigError or OSError if that cannot be."""
        self._notifier.tell("STATUS=Recovering")
        if self._shard is None:
            self.broker.open()
        else:
            await self._shard.open_broker(self.broker)
        self._port.bind()
        self.grpc_address = self._port.address
        self._http.listen()
        self.http_address = self._http.address
        self.broker.start()
        probe = LoopLagProbe(self._clock, self.broker.counters.loop_lag, stepped=self._note_clock_step)
        self.broker.supervisor.spawn_lasting("loop lag", probe.run())
        for name, watch in self._port.watches():
            self.broker.supervisor.spawn_lasting(name, watch)
        await self._port.server.start()
        if self.config.grpc_socket:
            await self._shortcut.start()
        self._health.tell(is_serving=True)
        log.info(
            "Serving",
            version=self._version,
            grpc=self.grpc_address,
            http=self.http_address,
            open_files_max=self._open_files_max,
            connections_max=self.config.connections_max,
        )
        await self._http.start()
        self._notifier.tell(
            "READY=1", f"STATUS=Serving gRPC on {self.grpc_address}, HTTP on {self.http_address}"
        )
        self.broker.supervisor.spawn(
            "service watchdog", self._notifier.keep_alive(lambda: self._failure is None)
        )

    async def stop(self) -> None:
        """Drain: no new work, streams are told, what was accepted is finished and checkpointed."""
        log.info("Stopping")
        self._notifier.tell("STOPPING=1", "STATUS=Draining")
        self._health.tell(is_serving=False)
        self.broker.drain()
        self._consumer.drain()
        grace_seconds = 0.0 if self._is_fenced else self.config.drain_grace_ms / 1000
        # Streams may end by themselves within the grace; whatever is left is cut.
        try:
            async with asyncio.timeout(grace_seconds):
                await self._consumer.wait_drained()
        except TimeoutError:
            log.warning("Some streams did not end within the grace period")
        last_seconds = min(grace_seconds, 1.0)
        await asyncio.gather(self._port.server.stop(last_seconds), self._shortcut.stop(last_seconds))
        await self._http.stop()
        await self.broker.stop()
        self._threads.close()
        log.info("Stopped")

    @property
    def _is_fenced(self) -> bool:
        """Return whether another broker owns the shard: nothing that a consumer does now would count."""
        return self._failure is not None and isinstance(self._failure.__cause__, Fenced)

    def _note_clock_step(self, step_ms: int) -> None:
        self.broker.counters.clock_steps += 1
        log.warning("The wall clock was set", step_ms=step_ms)

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error
            self._stop.set()

    def _add_services(self) -> None:
        server = self._port.server
        for name, handlers in self._handlers.items():
            if name in _ACCEPTED_APART:
                # The type stubs do not know it.
                server.add_registered_method_handlers(name, handlers)  # type: ignore[attr-defined]
                continue
            handler = grpc.method_handlers_generic_handler(name, handlers)
            server.add_generic_rpc_handlers((handler,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self.config.reflection_enabled:
            add_reflection((*self._handlers, health.SERVICE_NAME), server)

    def _handler(self, path: str) -> Handler:
        """Return what serves a method of the API."""
        _, service, method = path.split("/")
        return self._handlers[service][method]

    def reload_soon(self) -> None:
        with suppress(Unavailable):  # it stops
            self.broker.supervisor.spawn("reload", self._reload())

    async def _reload(self) -> None:
        """Take what can change while the broker serves: certificates, rights, tokens, the least level logged."""
        log.info("Reloading")
        self._port.look_now()
        if self._read_config is None:
            return
        try:
            fresh = await asyncio.to_thread(self._read_config)
        except ConfigError as error:
            log.error("The settings could not be reloaded; the previous ones stay in force", error=error)
            return
        set_log_level(fresh.log_level)
        names = [setting.name for setting in SETTINGS if setting.name != "log_level"]
        changed = [name for name in names if getattr(fresh, name) != getattr(self._given, name)]
        log.info("Reloaded", log_level=fresh.log_level)
        if changed:
            log.warning("Changed settings need a restart", settings=changed)

    def _describe_state(self) -> str:
        return self.broker.not_ready_because or "serving"

    def _take_snapshot(self) -> BrokerSnapshot:
        return take_snapshot(self.broker, None if self._shard is None else self._shard.snapshot())
