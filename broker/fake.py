"""The real broker in a thread of this process, with a clock that can be set forward: the inside of `postdate.testing`.

Everything is as in a broker of its own (gRPC on a loopback port, files in a folder), but for three things: its clocks
run ahead of the machine's by as much as they were advanced, so do the timers of its loop, and no file is synced, since
the folder goes with the broker.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import astuple
from typing import Any, TypeVar

from pyroaring import BitMap

from broker.config import BrokerConfig
from broker.folder.broker import Broker
from broker.model import Entries
from broker.runtime.clock import SystemClock
from broker.runtime.vfs import LocalFile, LocalVfs
from broker.server import Server
from broker.subscriptions.requests import extend
from broker.subscriptions.subscription import Subscription
from broker.topics.topic import Topic
from broker.tuning import Tuning

_T = TypeVar("_T")

_MIB = 1 << 20
_LOOK_SECONDS = 0.0005
_QUIET_LOOKS = 200
"""Messages that could be delivered and are not after so many wait for something else: a key whose slot moves, say."""

# (topic, subscription, consumer_id, message ids): what a consumer of this process keeps the leases of.
Kept = tuple[str, str, str, list[tuple[int, int]]]


class AdvancedClock:
    """The machine's clocks and as much more as they were advanced by."""

    def __init__(self) -> None:
        self._system = SystemClock()
        self.ahead_ms = 0

    def now_ms(self) -> int:
        return self._system.now_ms() + self.ahead_ms

    def monotonic_ns(self) -> int:
        return self._system.monotonic_ns() + self.ahead_ms * 1_000_000


class _Loop(asyncio.SelectorEventLoop):
    """A loop whose timers go by the advanced clock: one step forward, and what lies in between is due."""

    def __init__(self, clock: AdvancedClock) -> None:
        super().__init__()
        self._clock = clock

    def time(self) -> float:
        return super().time() + self._clock.ahead_ms / 1000


class _UnsyncedFile(LocalFile):
    def sync(self) -> None: ...


class _UnsyncedVfs(LocalVfs):
    def open(self, path: str, *, create: bool = False) -> _UnsyncedFile:
        return _UnsyncedFile(path, super().open(path, create=create).fileno())

    def sync_dir(self, path: str) -> None: ...


class FakeBroker:
    """Started and stopped from any thread; whatever else is asked runs on the broker's own loop."""

    def __init__(self) -> None:
        self._clock = AdvancedClock()
        self._folder = tempfile.TemporaryDirectory(prefix="postdate-fake-")
        self._loop = _Loop(self._clock)
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="postdate-fake-broker", daemon=True
        )
        self._server: Server | None = None
        self.address = ""

    def start(self) -> None:
        self._thread.start()
        try:
            self.run(self._start()).result()
        except BaseException:
            self._end()
            raise

    def stop(self) -> None:
        try:
            if self._server is not None:
                self.run(self._server.stop()).result()
        finally:
            self._end()

    def now_ms(self) -> int:
        return self._clock.now_ms()

    def run(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the fake broker was stopped before")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def settled(self) -> None:
        """Return once nothing is due that could be on its way to a consumer, and is not."""
        await self._settled_at_ms()

    async def _settled_at_ms(self) -> int:
        """Wait as `settled` does; when that was so."""
        quiet_looks, before = 0, None
        for topic in list(self._topics()):
            await topic.index.caught_up()
        while self._is_busy(now_ms := self._clock.now_ms()):
            counts = [
                value
                for topic in self._topics()
                for subscription in topic.subscriptions.values()
                for value in astuple(subscription.counters)
                if isinstance(value, int)  # a histogram equals no copy of it
            ]
            quiet_looks = quiet_looks + 1 if counts == before else 0
            if quiet_looks > _QUIET_LOOKS:
                break
            before = counts
            await asyncio.sleep(_LOOK_SECONDS)
        return now_ms

    async def step(self, until_ms: int, step_ms_min: int, kept: Iterable[Kept]) -> bool:
        """Go forward to what comes next, at most to `until_ms`; whether that is reached.

        What is kept is held for as long as it takes, and a lease longer.
        """
        # Since the last look a pace may have let a message go: what it saves up while that is on its way is lost. All
        # that follows is as of this one moment.
        now_ms = await self._settled_at_ms()
        left_ms = max(0, until_ms - now_ms)
        self._extend(kept, left_ms)
        stop_ms = min(
            (time_ms for time_ms in self._next_times_ms(now_ms) if time_ms > now_ms), default=until_ms
        )
        paced_ms = min(self._paced_until_ms(now_ms), default=until_ms)
        recurs_ms = (
            self._broker.recurring.next_ms
        )  # 0: one is being stored, and names its next time after that
        # No longer than pacing waits, as what it saves up meanwhile is bounded, and never past the time at which a
        # recurring schedule stores its next message: it would be missed.
        exact_ms = max(min(paced_ms, until_ms if recurs_ms is None else recurs_ms) - now_ms, 1)
        step_ms = min(left_ms, max(stop_ms - now_ms, step_ms_min), exact_ms)
        self._clock.ahead_ms += step_ms
        for topic in self._topics():
            for subscription in topic.subscriptions.values():
                for consumer in subscription.consumers:
                    subscription.consumers.heard(
                        consumer
                    )  # or those that said nothing meanwhile would count as hanging
        await asyncio.sleep(0)
        await self.settled()
        return step_ms == left_ms

    async def release(self, kept: Iterable[Kept]) -> None:
        """Give what was kept on the way an ordinary lease from now on."""
        self._extend(kept, 0)

    async def _start(self) -> None:
        config = BrokerConfig(
            data_dir=f"{self._folder.name}/data",
            grpc_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
            drain_grace_ms=100,
            disk_reserve_bytes=0,
            tuning=Tuning(
                journal_segment_bytes=_MIB * 4, request_bytes_max=_MIB * 4, journal_spare_segments_max=1
            ),
        )
        self._server = Server(config, vfs=_UnsyncedVfs(), clock=self._clock)
        await self._server.start()
        self.address = self._server.grpc_address

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._folder.cleanup()

    @property
    def _broker(self) -> Broker:
        assert self._server is not None
        return self._server.broker

    def _topics(self) -> Iterable[Topic]:
        return self._broker.registry.topics.values()

    def _is_busy(self, now_ms: int) -> bool:
        now_ns = self._clock.monotonic_ns()
        recurs_ms = self._broker.recurring.next_ms
        if recurs_ms is not None and recurs_ms <= now_ms:
            return True
        for topic in self._topics():
            due_ms = topic.index.next_due_ms()
            if (due_ms is not None and due_ms <= now_ms) or topic.index.tracker.needs_load(now_ms):
                return True
            for subscription in topic.subscriptions.values():
                deadline_ns = subscription.states.leases.next_deadline_ns()
                if deadline_ns is not None and deadline_ns <= now_ns:
                    return True
                if any(consumer.has_unsent for consumer in subscription.consumers):
                    return True
                if _can_deliver(topic, subscription) and not subscription.pacing.holds(now_ms):
                    return True
        return False

    def _paced_until_ms(self, now_ms: int) -> Iterable[int]:
        """Return when messages go that only a rate holds back."""
        for topic in self._topics():
            for subscription in topic.subscriptions.values():
                pacing = subscription.pacing
                held = pacing.holds(now_ms) and not pacing.waits_for_leases
                if held and _can_deliver(topic, subscription):
                    yield pacing.held_through_ms

    def _next_times_ms(self, now_ms: int) -> Iterable[int]:
        """Return the times at which something may happen by itself."""
        now_ns = self._clock.monotonic_ns()
        for topic in self._topics():
            yield topic.index.next_due_ms() or now_ms
            for subscription in topic.subscriptions.values():
                yield subscription.states.redelivery.next_ms() or now_ms
                deadline_ns = subscription.states.leases.next_deadline_ns()
                if deadline_ns is not None:
                    yield now_ms + (deadline_ns - now_ns) // 1_000_000 + 1

    def _extend(self, kept: Iterable[Kept], by_ms: int) -> None:
        for topic_name, name, consumer_id, ids in kept:
            for topic in self._topics():
                for subscription in topic.subscriptions.values():
                    if (topic.name, subscription.name) == (topic_name, name):
                        consumers = {
                            consumer.consumer_id: consumer.lease_ms for consumer in subscription.consumers
                        }
                        lease_ms = consumers.get(consumer_id) or subscription.policy.lease_ms
                        extend(subscription, consumer_id, entries_of(ids), by_ms + lease_ms)


def _can_deliver(topic: Topic, subscription: Subscription) -> bool:
    """Return whether there are messages, and somebody who takes them."""
    takes = any(consumer.can_take for consumer in subscription.consumers.takers())
    return takes and topic.subscription_counts(subscription).ready > 0


def entries_of(ids: Iterable[tuple[int, int]]) -> Entries:
    by_ledger: dict[int, list[int]] = {}
    for ledger_id, entry_id in ids:
        by_ledger.setdefault(ledger_id, []).append(entry_id)
    return {ledger_id: BitMap(entry_ids) for ledger_id, entry_ids in by_ledger.items()}
