"""Hand-in to a broker that serves nobody: the broker itself, without its network, under the folder's lock."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from broker.config import BrokerConfig
from broker.errors import NotFound
from broker.folder.broker import Broker
from broker.folder.compaction import Compactions
from broker.folder.shard_folders import refuse_shard_folders
from broker.runtime.clock import Clock
from broker.runtime.vfs import Vfs


@contextlib.asynccontextmanager
async def open_offline(vfs: Vfs, clock: Clock, folder: str) -> AsyncIterator[Compactions]:
    """Open a stopped broker's folder. Raises Fenced if a broker runs on it, NotFound, Corrupt, OSError."""
    refuse_shard_folders(vfs, folder)
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
            for topic in broker.registry.by_name.values():
                await topic.index.wait_built()
            yield broker.compactions
        finally:
            await broker.stop()
        if failures:
            raise failures[0]
