"""Compaction of a folder that no broker uses: the broker itself, without its network, under the folder's lock."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from broker.config import BrokerConfig
from broker.errors import NotFound
from broker.runtime.clock import Clock
from broker.runtime.vfs import Vfs
from broker.storage.compaction_inputs import Outputs
from broker.topics.broker import Broker
from broker.topics.compaction_values import Candidates, Committed, Lease


class OfflineDesk:
    """A `Desk` in this process."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    @property
    def data_dir(self) -> str:
        return self._broker.config.data_dir

    async def topics(self) -> list[str]:
        return sorted(self._broker.registry.by_name)

    async def candidates(self, topic: str) -> Candidates:
        await self._broker.registry.topic(topic).index.wait_built()
        return await self._broker.compactions.candidates(topic)

    async def begin(self, topic: str, ledger_ids: Sequence[int], bucket_ids: Sequence[int]) -> Lease:
        return await self._broker.compactions.begin(topic, ledger_ids, bucket_ids)

    async def commit(self, lease: Lease, outputs: Outputs) -> Committed:
        return await self._broker.compactions.commit(lease.compaction_id, lease.epoch, outputs)

    async def abort(self, lease: Lease) -> None:
        await self._broker.compactions.abort(lease.compaction_id, lease.epoch)


@contextlib.asynccontextmanager
async def open_offline(vfs: Vfs, clock: Clock, folder: str) -> AsyncIterator[OfflineDesk]:
    """Open a stopped broker's folder. Raises Fenced if a broker runs on it, NotFound, Corrupt, OSError."""
    if not vfs.exists(f"{folder}/broker.manifest"):
        raise NotFound(f"{folder!r} is not a data directory: it has no broker.manifest")
    failures: list[BaseException] = []
    with contextlib.ExitStack() as threads:
        journal, files, index = (threads.enter_context(ThreadPoolExecutor(1)) for _ in range(3))
        broker = Broker(
            BrokerConfig(data_dir=folder),
            vfs=vfs,
            clock=clock,
            rng=random.SystemRandom(),
            journal_executor=journal,
            file_executor=files,
            read_executor=threads.enter_context(ThreadPoolExecutor(2)),
            index_executor=index,
            on_failure=failures.append,
        )
        broker.open()
        broker.start_offline()
        try:
            yield OfflineDesk(broker)
        finally:
            await broker.stop()
        if failures:
            raise failures[0]
