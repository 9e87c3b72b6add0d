"""Backups and restores over an object store: a backup's folder becomes a base, a base a data directory."""

from __future__ import annotations

import contextlib
from concurrent.futures import Executor

from broker.cluster.base_manifest import Base, BaseManifest
from broker.cluster.base_store import BaseCut, BaseStore, Tell
from broker.errors import Refused
from broker.folder.backup import read_marker
from broker.folder.restore import NewDataDir
from broker.folder.shard_folders import refuse_shard_folders
from broker.folder.tree_copy import check_room
from broker.runtime.steps import run_step
from broker.runtime.vfs import Vfs
from broker.storage.layout import ROOT_MANIFEST, Layout
from broker.storage.manifest import BrokerImage, decode_broker

_OF_A_DATA_DIR = frozenset({"alive", "journal", "topics"})
"""Names of what is downloaded of a base; the root manifest is written last, and nothing else is to be there."""


async def upload_backup(
    bases: BaseStore,
    vfs: Vfs,
    folder: str,
    *,
    executor: Executor | None = None,
    tell: Tell = lambda count: None,
) -> Base:
    """Store a backup as a base. Raises NotFound or Corrupt unless it is one, Refused, Unavailable, OSError."""
    layout = Layout(folder.rstrip("/"))
    await run_step(executor, lambda: refuse_shard_folders(vfs, layout.root))
    backup = await run_step(executor, lambda: read_marker(vfs, layout.root))
    cut = BaseCut(
        tag=backup.name,
        label=backup.label,
        broker_id=backup.broker_id,
        create_time_ms=backup.create_time_ms,
        lsn=backup.lsn,
        topics=backup.topics,
    )
    return await bases.upload(vfs, layout, cut, tell)


def data_paths(manifest: BaseManifest) -> list[str]:
    """Return the paths of what is downloaded of a base before its root manifest is written."""
    return [path for path in manifest.files if path.partition("/")[0] in _OF_A_DATA_DIR]


async def read_root(bases: BaseStore, manifest: BaseManifest) -> BrokerImage:
    """Return the root manifest of a base. Raises Corrupt, NotFound, OSError."""
    content = await bases.read_file(manifest, ROOT_MANIFEST)
    return decode_broker(content, f"{manifest.base.name}/{ROOT_MANIFEST}")


async def restore_base(
    bases: BaseStore,
    base: Base,
    vfs: Vfs,
    data_dir: str,
    broker_id: str,
    *,
    executor: Executor | None = None,
    tell: Tell = lambda count: None,
) -> None:
    """Make a data directory from a base. Raises as `Restore.steps` does, and NotFound if the base is gone."""
    manifest = await bases.read_manifest(base.name)
    root = await read_root(bases, manifest)
    if root.shard and root.broker_id != broker_id:
        raise Refused(
            f"Base {base.name} belongs to {root.shard}, and only a node of that cluster can start from it, because "
            "later changes are in the cluster's log. For a broker without a cluster, restore the URL of the "
            "cluster with --to TIME",
            reason="BASE_OF_A_SHARD",
        )
    target = NewDataDir(vfs, data_dir)
    held = contextlib.ExitStack()
    try:
        await run_step(executor, lambda: held.enter_context(target.being_made()))
        await run_step(executor, lambda: check_room(vfs, target.layout.root, base.bytes, 0))
        await bases.download(vfs, manifest, data_paths(manifest), target.layout.root, tell)
        await run_step(executor, lambda: target.finish(root, broker_id))
    finally:
        await run_step(executor, held.close)
