"""A broker with several shards: a process for each, kept running, and one front for all of them.

Invariants:
  SUPERVISOR-1  A shard that ends is started again, after a pause that grows; no other one notices.
  SUPERVISOR-2  The supervisor decides nothing about a message, and holds none longer than a call. It may die at any
      time: its children die with it, and come back as after a crash.
  SUPERVISOR-3  A shard that was ready and does not answer any more is killed, after a bound, and so started again.
  SUPERVISOR-4  Where a task fails that keeps these true, or security files in force, or looks after the process, the
      broker ends with status 1.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from broker.config import BrokerConfig
from broker.errors import Unavailable
from broker.folder.backup import backup_folder
from broker.folder.shard_folders import note_begun, open_shard_folders
from broker.observe.audit_trail import AuditTrail
from broker.observe.logs import get_logger, set_log_level
from broker.observe.metrics import BrokerCollector, BrokerCounters, BrokerSnapshot
from broker.observe.shard_metrics import merge_metrics
from broker.rpc.front import FrontHost
from broker.rpc.own_calls import OwnCalls
from broker.rpc.shard_front import ShardFront
from broker.rpc.shard_owners import LocalShards
from broker.runtime.clock import SystemClock
from broker.runtime.descriptors import fit_descriptors, raise_descriptor_limit
from broker.runtime.notify import ServiceNotifier
from broker.runtime.supervise import Supervisor
from broker.runtime.vfs import File, LocalVfs
from broker.server import broker_version
from broker.settings import UNIX, ConfigError
from broker.shards.child import ShardChild, child_environ
from broker.shards.shard_process import check_sockets, grpc_socket, http_socket, sockets_folder
from broker.web.server import HttpServer
from broker.web.shard_http import ShardHttp
from broker.web.source import PageSource, ShardSource

log = get_logger(__name__)

_LOOK_SECONDS = 1.0
_FIRST_LOOK_SECONDS = 0.1
"""Between looks at a shard that is not ready."""
_ANSWER_SECONDS = 2.0
_SILENT_LOOKS_MAX = 15
"""So many looks in a row that a shard leaves without an answer: it is frozen, and killed. Looks count, not the time, in
which this process may itself have been stopped."""
_KILL_AFTER_SECONDS = 30.0
"""Time for a shard to write its checkpoint, after the grace that its consumers have."""

Command = Callable[[int], Sequence[str]]


class ShardSupervisor:
    """See the module's description."""

    def __init__(
        self,
        config: BrokerConfig,
        command: Command,
        *,
        notifier: ServiceNotifier,
        read_config: Callable[[], BrokerConfig],
        shards: int = 0,
    ) -> None:
        """`command` starts the process of a shard. `shards`: how many, if not by the settings. Raises ConfigError."""
        shards = shards or config.shards
        check_sockets(config, shards)
        self._config = config
        self._notifier = notifier
        self._read_config = read_config
        self._stop = asyncio.Event()
        self._supervisor = Supervisor(lambda *_: self._stop.set())
        self._version = broker_version()
        environ = child_environ(os.environ)
        numbers = range(shards)
        self._children = [
            ShardChild(number, command(number), environ, on_ended=self._note_ended) for number in numbers
        ]
        self._not_ready: dict[int, str] = dict.fromkeys(numbers, "starting")
        self._silent: set[int] = set()
        """Shards that left the last look without an answer."""
        self._ready_start: dict[int, int] = {}  # by shard: the start that was ready once
        self._is_serving = False
        self._has_begun = False  # all shards have served since this process began
        self._page: asyncio.Task[bytes] | None = None
        self._counters = BrokerCounters()
        fitted, lowered = fit_descriptors(config, raise_descriptor_limit())
        for setting in lowered:
            log.warning("A setting of the front was lowered to fit the limit of open files", setting=setting)
        host = FrontHost(fitted, SystemClock(), self._counters)
        self._front = self._make_front(host, [UNIX + grpc_socket(config, number) for number in numbers])
        self._https: list[ShardHttp] = []
        self._audit = AuditTrail(SystemClock())  # of the pages that the front has by itself
        self._own_metrics = BrokerCollector(self._take_snapshot, version=self._version)
        self._http = HttpServer(
            config.http_address,
            self._share_metrics,
            self._not_ready_because,
            pages=self._make_pages(),
            calls=OwnCalls(lambda: self._front.address),
            ready_line=self._ready_line,
            connections_max=config.tuning.http_connections_max,
        )

    def _make_front(self, host: FrontHost, addresses: Sequence[str]) -> ShardFront:
        """Return the front of shards whose processes listen on these sockets."""
        return ShardFront(host, LocalShards(host.config, addresses))

    def _make_pages(self) -> PageSource:
        """Return what the pages show."""
        clock = SystemClock()
        shards = ShardSource(len(self._children), self._find_pages)
        return PageSource(
            self._config, clock, self._version, self._audit, self._front.page_calls(), shards=shards
        )

    def _find_pages(self, number: int) -> ShardHttp:
        """Return the process that has a shard's pages. Raises Unavailable where that is none of this machine."""
        return self._https[number]

    def _ready_line(self) -> str:
        """Return what /readyz says where all is well."""
        return "ok"

    def _open_folder(self) -> File:
        """Return what holds the lock of the data directory, made if need be. Raises Fenced or Refused."""
        return open_shard_folders(LocalVfs(), self._config.data_dir, self._config.shards)

    def _note_begun(self) -> None:
        """Write down that every shard has served; the files are written once in the life of a data directory."""
        try:
            note_begun(LocalVfs(), self._config.data_dir)
        except (OSError, Unavailable) as error:  # it is tried again at the next start
            log.warning("The marker that all shards have served could not be written", error=str(error))

    def _watches(self) -> list[Coroutine[Any, Any, None]]:
        """Return what runs for as long as the shards do."""
        return [self._watch(child.number) for child in self._children]

    async def _stop_children(self, running: Sequence[asyncio.Task[None]]) -> None:
        """Have the processes drain. `running`: by number, what keeps each running."""
        for child in self._children:
            child.stop()

    async def run(self) -> int:
        """Serve until a signal or a failure; returns the exit status.

        Raises Fenced, Refused, ConfigError or OSError.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        self._notifier.tell("STATUS=Starting shards")
        lock = self._open_folder()
        folder = sockets_folder(self._config)
        os.makedirs(folder, mode=0o700, exist_ok=True)
        os.chmod(folder, 0o700)  # whoever may connect is let in
        if self._config.backup_dir == "auto":  # shards make their own folders in it
            os.makedirs(backup_folder(self._config), mode=0o700, exist_ok=True)
        self._front.bind()
        self._http.listen()
        children = [
            self._supervisor.spawn(f"process of shard {child.number}", child.run())
            for child in self._children
        ]
        try:
            self._https = [
                ShardHttp(child.number, http_socket(self._config, child.number)) for child in self._children
            ]
            await self._front.start(self._supervisor)
            await self._http.start()
            for watch in self._watches():
                self._supervisor.spawn_lasting("looks at a shard", watch)
            self._supervisor.spawn("service watchdog", self._notifier.keep_alive(lambda: True))
            await self._stop.wait()
        finally:
            await self._end(children)
            lock.close()
        return 0 if self._supervisor.failure is None else 1

    async def _end(self, children: Sequence[asyncio.Task[None]]) -> None:
        log.info("Stopping")
        self._notifier.tell("STOPPING=1", "STATUS=Draining")
        self._front.drain()
        await self._stop_children(children)
        # Calls under way are passed on until their shard has ended them.
        await self._wait_end(dict(enumerate(children)))
        await self._supervisor.stop()
        if self._page is not None:
            self._page.cancel()
            await asyncio.gather(self._page, return_exceptions=True)
        await self._front.stop()
        await self._http.stop()
        for http in self._https:
            await http.close()
        self._audit.flush()
        log.info("Stopped")

    async def _wait_end(self, running: Mapping[int, asyncio.Task[None]]) -> None:
        """Return when processes that were told to stop have ended: those that are late are killed, once for good."""
        await asyncio.wait(running.values(), timeout=process_stop_seconds(self._config))
        late = [number for number, task in running.items() if not task.done()]
        if late:
            log.error("Shards did not end in time and are killed", shards=late)
            for number in late:
                self._children[number].kill()
            await asyncio.wait(running.values())

    def _note_ended(self, number: int) -> None:
        self._not_ready[number] = "its process has ended"

    async def _watch(self, number: int) -> None:
        """Look whether a shard is ready, until cancelled."""
        child = self._children[number]
        silent_looks = 0
        while True:
            start = child.starts
            readiness = await self._https[number].readiness(_ANSWER_SECONDS)
            silent_looks = silent_looks + 1 if readiness.is_silent else 0
            (self._silent.add if readiness.is_silent else self._silent.discard)(number)
            if silent_looks >= _SILENT_LOOKS_MAX:
                silent_looks = 0
                self._kill_frozen(child, start)
            reason = readiness.not_ready_because
            if reason is None:
                self._ready_start[number] = start
                self._not_ready.pop(number, None)
            else:
                self._not_ready[number] = reason
            if bool(self._not_ready) == self._is_serving:
                self._is_serving = not self._not_ready
                self._tell_state()
                if self._is_serving and not self._has_begun:
                    self._has_begun = True
                    self._note_begun()
            await asyncio.sleep(_FIRST_LOOK_SECONDS if reason is not None else _LOOK_SECONDS)

    def _kill_frozen(self, child: ShardChild, start: int) -> None:
        """Kill a process that was ready and does not answer any more; one that starts or recovers takes its time."""
        if self._ready_start.get(child.number) == start == child.starts and not self._stop.is_set():
            log.error(
                "The process of a shard does not answer and is killed", shard=child.number, pid=child.pid
            )
            child.send(signal.SIGKILL)

    def _tell_state(self) -> None:
        """Say that all shards serve, or that one does not any more."""
        if self._stop.is_set():
            return
        if not self._is_serving:
            log.warning("Some shards are not ready", because=self._not_ready_because())
            return
        grpc, http = self._front.address, self._http.address
        log.info("Serving", version=self._version, grpc=grpc, http=http, shards=len(self._children))
        self._notifier.tell(
            "READY=1", f"STATUS=Serving gRPC on {grpc}, HTTP on {http}, with {len(self._children)} shards"
        )

    def _not_ready_because(self) -> str | None:
        if self._stop.is_set():
            return "draining"
        return "; ".join(f"shard {number}: {why}" for number, why in sorted(self._not_ready.items())) or None

    async def _share_metrics(self) -> bytes:
        """Return the page that is being made, or make one: scrapes at the same time share it."""
        if self._page is None or self._page.done():
            self._page = asyncio.create_task(self._render_metrics(), name="page of metrics")
        return await asyncio.shield(self._page)

    async def _render_metrics(self) -> bytes:
        """Return the metrics of all processes that answer."""
        looked_at = [child.number for child in self._children if child.pid]
        answers = await asyncio.gather(
            *(self._https[number].metrics(_ANSWER_SECONDS) for number in looked_at)
        )
        pages = {"front": await self._own_metrics.render()}
        for number, page in zip(looked_at, answers, strict=True):
            if page is not None:
                pages[str(number)] = page
        return await merge_metrics(pages)

    def _take_snapshot(self) -> BrokerSnapshot:
        return BrokerSnapshot(
            self._counters,
            (),
            (),
            topics_count=0,
            subscriptions_count=0,
            ready=self._not_ready_because() is None,
        )

    def _reload(self) -> None:
        """Pass SIGHUP on to processes that were ready once, and so listen to it; read anew what the front has read."""
        for child in self._children:
            if self._ready_start.get(child.number) == child.starts:
                child.send(signal.SIGHUP)
        self._front.look_now()
        with suppress(ConfigError):  # the shards say what is wrong
            set_log_level(self._read_config().log_level)


def process_stop_seconds(config: BrokerConfig) -> float:
    """Return the time that the process of a shard has to drain and end, before it is killed."""
    return config.drain_grace_ms / 1000 + _KILL_AFTER_SECONDS


def shard_command(
    config: BrokerConfig, config_path: str | None, flags: Mapping[str, str], supervisor_pid: int
) -> Callable[[int], list[str]]:
    """Return what makes the command that starts the process of a shard, with the settings given to this one.

    A shard that is started again reads the file of settings anew. How many shards there are, and where, stays as it is.
    """
    fixed = {**flags, "shards": str(config.shards), "data_dir": config.data_dir}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in fixed.items()]
    if config_path is not None:
        given.append(f"--config={config_path}")
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = "broker" if spec is None else spec.name.removesuffix(".__main__")
    # A command that was installed looks for no code in the working directory; `python -m` would. Who started this one
    # by `python -m` may have the code there.
    path = ["-P"] if spec is None or sys.flags.safe_path else []

    def command(number: int) -> list[str]:
        internal = [f"--number={number}", f"--supervisor={supervisor_pid}"]
        return [sys.executable, *path, "-m", module, "serve-shard", *internal, *given]

    return command
