"""Messages of which only a part has arrived, after the first one of a stream: bounded in total.

gRPC takes in a message for whoever reads, up to the greatest request, and says nothing of what has come before it is
whole. It has one limit of a message for all methods, and none for all connections. The kernel counts what has arrived
on a connection; what exceeds the messages that were read of it is unfinished, or is what the wire adds to messages.

Invariants:
  UNFINISHED-1  While the memory of the process is less than `most` bytes, or streams could not send as much, nothing is
      looked at. Otherwise it is looked at before the memory has grown by an eighth of `most`. While streams could not
      send as much the memory is not asked for either: a broker with few streams is not woken.
  UNFINISHED-2  Where a look finds more than `most` unfinished bytes, connections are ended, those with most of them
      first, until three quarters are left.
  UNFINISHED-3  A connection is credited with more than its client's library adds to messages (`_ADDED_...`), and never
      has more unfinished bytes than its streams can. So whoever sends whole messages is ended only where everybody
      who does not was.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from broker.observe.logs import get_logger
from broker.runtime.allocator import Trimmer
from broker.runtime.connections import Peer, ReceiveCounters, cut_connections, peer_of, received_by_peer

log = get_logger(__name__)

LOOK_SECONDS = 0.05
_LOG_SECONDS = 10.0
_ADDED_TO_CALL = 1_024  # its headers, with a token
_ADDED_TO_MESSAGE = 64  # the head of a frame, the gRPC prefix, a record of TLS
_ADDED_SHIFT = 7  # a frame for each 16 KiB: a 128th is more
_ADDED_TO_SEGMENT = 64  # what is sent is answered with windows and pings
_STATM = Path("/proc/self/statm")


@dataclass(slots=True, eq=False)
class Arrivals:
    """A connection, and what was read of it."""

    whole_bytes: int = 0
    messages: int = 0
    calls_begun: int = 0
    calls: int = 0  # under way
    streams: int = 0  # of these, streams whose first message was read
    added_bytes: int = 0  # beyond what it is credited with; arrived while no call was under way

    def begin(self) -> None:
        self.calls_begun += 1
        self.calls += 1

    def read(self, length: int) -> None:
        self.whole_bytes += length
        self.messages += 1

    def begin_anew(self) -> None:
        """Forget another connection from the same port."""
        self.whole_bytes = self.messages = self.calls_begun = self.added_bytes = 0

    @property
    def credited_bytes(self) -> int:
        added = _ADDED_TO_MESSAGE * self.messages + _ADDED_TO_CALL * self.calls_begun
        return self.whole_bytes + (self.whole_bytes >> _ADDED_SHIFT) + added


class UnfinishedMessages:
    """See the module's description."""

    def __init__(self, most_bytes: int, message_bytes_max: int, trimmer: Trimmer) -> None:
        self.streams = 0
        """Streams of all connections whose first message was read."""
        self._most_bytes = most_bytes
        self._message_bytes_max = message_bytes_max
        self._trimmer = trimmer
        self._arrivals: dict[str, Arrivals] = {}  # by the name of the peer
        self._seen_bytes = 0  # of memory at the last look, or less since
        self._forget_at = 1_000
        self._woken = asyncio.Event()
        self._ended = 0  # and not logged yet
        self._log_at = 0.0

    def of(self, peer: str) -> Arrivals:
        """Return the connection from a peer."""
        arrivals = self._arrivals.get(peer)
        if arrivals is None:
            arrivals = self._arrivals[peer] = Arrivals()
            self._wake()
        return arrivals

    def begin(self, arrivals: Arrivals) -> None:
        """Count a stream whose later messages are read from now on."""
        arrivals.streams += 1
        self.streams += 1
        self._wake()

    def end(self, arrivals: Arrivals) -> None:
        arrivals.streams -= 1
        self.streams -= 1

    async def watch(self, port: int) -> None:
        """Look at the connections whenever it may be too much; ends only by being cancelled."""
        while True:
            if not self.needs_watch:
                self._woken.clear()
                self._seen_bytes = 0  # what the memory does meanwhile is not seen
                await self._woken.wait()
            await asyncio.sleep(LOOK_SECONDS)
            if not self.may_be_too_much(resident_bytes()) and len(self._arrivals) < self._forget_at:
                continue
            with suppress(OSError):  # no descriptor is left to look with
                too_much = self.look(await asyncio.to_thread(received_by_peer, port))
                if too_much:
                    self._log_ended(len(await asyncio.to_thread(cut_connections, too_much)))
                    self._trimmer.ask()

    @property
    def needs_watch(self) -> bool:
        """Return whether streams could have more that is unfinished than they may, or connections must be forgotten."""
        could_send = self.streams * self._message_bytes_max
        return could_send > self._most_bytes or len(self._arrivals) >= self._forget_at

    def _wake(self) -> None:
        if self.needs_watch:
            self._woken.set()

    def _log_ended(self, count: int) -> None:
        self._ended += count
        now = asyncio.get_running_loop().time()
        if now >= self._log_at:
            log.warning(
                "Closed connections because incomplete messages take too much memory",
                connections=self._ended,
            )
            self._ended, self._log_at = 0, now + _LOG_SECONDS

    def may_be_too_much(self, memory_bytes: int) -> bool:
        """Return whether a look is due (UNFINISHED-1)."""
        self._seen_bytes = min(self._seen_bytes, memory_bytes)
        if self.streams * self._message_bytes_max <= self._most_bytes or memory_bytes < self._most_bytes:
            return False
        if memory_bytes < self._seen_bytes + self._most_bytes // 8:
            return False
        self._seen_bytes = memory_bytes
        return True

    def look(self, received: Mapping[Peer, ReceiveCounters]) -> list[Peer]:
        """Return the connections to end, of all that there are."""
        unfinished: dict[Peer, int] = {}
        for name, arrivals in list(self._arrivals.items()):
            peer = peer_of(name)
            if peer is None or (here := received.get(peer)) is None:
                if not arrivals.calls:
                    del self._arrivals[name]
            elif (count := self._unfinished_of(arrivals, here)) > 0:
                unfinished[peer] = count
        self._forget_at = max(1_000, 2 * len(self._arrivals))
        total, ended = sum(unfinished.values()), list[Peer]()
        if total > self._most_bytes:
            self._seen_bytes = 0
            for peer, count in sorted(unfinished.items(), key=lambda item: item[1], reverse=True):
                if total <= self._most_bytes * 3 // 4:
                    break
                total -= count
                ended.append(peer)
        return ended

    def _unfinished_of(self, arrivals: Arrivals, received: ReceiveCounters) -> int:
        if received.total_bytes < arrivals.whole_bytes:
            arrivals.begin_anew()
        beyond = received.total_bytes - arrivals.credited_bytes - _ADDED_TO_SEGMENT * received.segments_sent
        if not arrivals.calls:
            arrivals.added_bytes = max(0, beyond)
        return max(0, min(beyond - arrivals.added_bytes, arrivals.streams * self._message_bytes_max))


def resident_bytes() -> int:
    """Return the memory of this process that no file backs; 0 where the system does not tell."""
    try:
        _, resident, shared = map(int, _STATM.read_bytes().split()[:3])
    except OSError:
        return 0
    return (resident - shared) * _PAGE_BYTES


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
