"""Second names of all that a checkpoint wrote, so that it can be read while the broker goes on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from functools import partial

from broker.folder.checkpoint import Checkpointer
from broker.folder.tree_copy import Steps, advance, pin_topics, remove_in_steps
from broker.runtime.steps import run_step
from broker.runtime.vfs import Vfs, replace_file
from broker.storage.layout import Layout
from broker.storage.manifest import BrokerImage, decode_broker
from broker.storage.named_files import read_named


@contextlib.asynccontextmanager
async def pinned(
    vfs: Vfs, layout: Layout, checkpointer: Checkpointer, executor: Executor | None
) -> AsyncIterator[tuple[Layout, BrokerImage]]:
    """Write a checkpoint; yields a folder with second names of its files, and its root. One at a time.

    Files that still grow do so under both names: a manifest says how much of them counts. Raises OSError.
    """
    pins = Layout(layout.pins)
    if await run_step(executor, lambda: vfs.exists(pins.root)):
        await _run(executor, remove_in_steps(vfs, pins.root))
    async with checkpointer.at_rest():
        content = await run_step(executor, lambda: read_named(vfs, layout.manifest))
        root = decode_broker(content, layout.manifest)
        await _run(executor, pin_topics(vfs, layout, pins, root))
    try:
        await run_step(executor, lambda: replace_file(vfs, pins.manifest, [content]))
        yield pins, root
    finally:
        await _run(executor, remove_in_steps(vfs, pins.root))


async def _run(executor: Executor | None, steps: Steps) -> None:
    is_done = False
    while not is_done:
        is_done, _ = await run_step(executor, partial(advance, steps))
