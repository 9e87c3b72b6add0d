"""The making of a standby's folder: from a base, where there is no whole folder or what comes after it was trimmed.

The newest base is taken that can be used. A folder that is cut off all the same waits for another base: with those
that are there it would come to the same, after a download each time.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from broker.cluster.follower import CutOff
from broker.errors import Corrupt
from broker.node.member import Member
from broker.node.shard_bases import needs_seed
from broker.observe.logs import get_logger

log = get_logger(__name__)

PAUSE_SECONDS = 30.0


class Seeding:
    """See the module's description."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._is_cut_off = False
        self._tried: frozenset[str] | None = None
        """The bases that were there when one of them was last begun with, or none could be."""

    def note_cut_off(self, error: CutOff) -> None:
        """Note that the folder is behind what was trimmed."""
        log.warning(
            "The data directory is older than the start of the trimmed journal; rebuilding it from a base",
            error=str(error),
        )
        self._is_cut_off = True

    async def run(self, stop: asyncio.Event) -> bool:
        """Make the folder if it is not whole or is behind; returns False if `stop` came before.

        Raises Corrupt, OSError.
        """
        member = self._member
        data_dir = member.config.data_dir
        while self._is_cut_off or needs_seed(member.vfs, data_dir):
            if not await self._wait_bases(stop):
                return False
            names = await member.bases.names()
            shards = data_dir.rpartition("/")[0]
            for folder in (shards.rpartition("/")[0], shards):
                member.vfs.make_dir(folder)
                member.vfs.sync_dir(folder.rpartition("/")[0] or ".")
            is_seeded = await member.bases.seed(data_dir)
            self._tried = names or None
            if not is_seeded and not names and self._is_cut_off:
                raise Corrupt(
                    "The journal was trimmed and there is no base to start from: bases were removed",
                    path=self._place,
                )
            if is_seeded or not names:  # without bases the log is read from its beginning
                self._is_cut_off = False
                break
        return True

    async def _wait_bases(self, stop: asyncio.Event) -> bool:
        """Wait until there are other bases than those that were of no use; returns False if `stop` came before."""
        is_told = False
        while self._tried is not None and await self._member.bases.names() == self._tried:
            if not is_told:
                log.error(
                    "No base in the object store fits the remaining journal; waiting for a new base",
                    bases=self._place,
                    names=sorted(self._tried),
                )
                is_told = True
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), PAUSE_SECONDS)
            if stop.is_set():
                return False
        return True

    @property
    def _place(self) -> str:
        return f"{self._member.store.url}/shards/{self._member.shard.number}/bases"
