"""`postdate-broker reshard`: each shard of a folder is closed with a checkpoint, then their topics are spread anew."""

from __future__ import annotations

from broker.folder.reshard import Reshard
from broker.jobs.compact_offline import open_offline
from broker.runtime.clock import Clock, SystemClock
from broker.runtime.vfs import Vfs


async def reshard_folder(
    vfs: Vfs, data_dir: str, shards: int, to: str | None = None, clock: Clock | None = None
) -> str:
    """Do it; returns what was done, in one line. Raises what `Reshard` and `open_offline` raise."""
    work = Reshard(vfs, data_dir, shards, to)
    try:
        for folder in work.begin():
            async with open_offline(vfs, clock or SystemClock(), folder):
                pass
        plans = work.run()
    finally:
        work.close()
    topics = [len(plan.root.topics) for plan in plans]
    spread = f" ({', '.join(map(str, topics))})" if shards > 1 else ""
    return (
        f"{to or data_dir} has {shards} {'shard' if shards == 1 else 'shards'} with {sum(topics)} topics{spread}; "
        f"{work.files} files, {work.copied_bytes} bytes copied: start a broker on it with --shards {shards}"
    )
