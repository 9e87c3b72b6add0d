"""Connections without a call give way to new ones.

gRPC counts connections itself, and closes those beyond the limit as they come, before any code of ours knows of them.
So whoever holds connections and says nothing would keep all others out until they are idle for long. While nine in ten
places are taken, connections on which no call is under way are ended, those that have been silent for longest first.
An honest client whose connection was silent makes another with its next call.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import suppress

from broker.observe.logs import get_logger
from broker.runtime.connections import Peer, cut_connections, descriptor_count, peer_of, peers_by_family

log = get_logger(__name__)

LOOK_SECONDS = 1.0
"""Between two looks, on average. Who comes back in step with them would take each place the moment that it is freed."""
_FULL, _ENOUGH = 0.9, 0.8


class SilentConnections:
    """Connections of the gRPC port; `most` are taken on each address that it listens on."""

    def __init__(self, most: int) -> None:
        self.calls: Counter[str] = Counter()
        """Calls under way that may take places, by the name of their peer."""
        self._most = most
        self._silent: dict[Peer, None] = {}  # at the last look; the longest first

    def began(self, peer: str) -> None:
        self.calls[peer] += 1

    def ended(self, peer: str) -> None:
        self.calls[peer] -= 1
        if not self.calls[peer]:
            del self.calls[peer]

    async def watch(self, port: int) -> None:
        """Look at the connections now and then; ends only by being cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS * random.uniform(0.5, 1.5))
            with suppress(OSError):  # no descriptor is left to look with
                await asyncio.to_thread(self._look, port, list(self.calls))

    def _look(self, port: int, speaking: list[str]) -> None:
        """End what was silent at the last look too, if places are few."""
        if descriptor_count() < _FULL * self._most:
            self._silent.clear()
            return
        families = peers_by_family(port).values()
        speaks = {peer_of(name) for name in speaking}
        silent = {peer for peers in families for peer in peers if peer not in speaks}
        before = [peer for peer in self._silent if peer in silent]
        self._silent = dict.fromkeys([*before, *silent.difference(before)])
        for peers in families:
            if len(peers) >= _FULL * self._most:
                mine = set(peers)
                too_many = len(peers) - int(_ENOUGH * self._most)
                count = len(cut_connections(set([peer for peer in before if peer in mine][:too_many])))
                if count:
                    log.warning(
                        "Closed idle connections because connections_max is nearly reached",
                        connections=len(peers),
                        ended=count,
                    )
