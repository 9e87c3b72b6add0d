"""Recovery: from whatever a crash has left to the state that was promised. There is one path.

    1  read `broker.manifest`, then the manifest of every topic that it names, and their cursors
    2  open the journal, which must reach from `checkpoint_lsn` to what the manifests hold
    3  cut each unsealed ledger to the length that its manifest names
    4  replay the journal from `checkpoint_lsn` on; each topic takes what lies above its own `applied_lsn`
    5  sync the folders of manifests that may not be durable under their names
    6  remove what no manifest names

Its cost is bounded by the checkpoint interval, not by what is pending. Recovering twice gives the same state as
recovering once. Damage raises `Corrupt`, with the file, the offset and what to do; nothing is skipped. Nothing is
removed before all of that went well: under a wrong root, put there by a restore that went wrong, every topic is
one that no manifest names.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from broker.errors import Corrupt, Fenced
from broker.runtime.vfs import Vfs, replace_file
from broker.storage.amendments import Amendments, decode_amendments
from broker.storage.blocks import KINDS, LedgerName, file_lengths
from broker.storage.bulk import BulkImage, decode_bulk
from broker.storage.group_log import NO_SHARD, ShardName, records_from
from broker.storage.journal import Journal
from broker.storage.layout import Layout, is_unused, remove_tree
from broker.storage.ledger_files import cut_ledger
from broker.storage.manifest import (
    BrokerImage,
    CursorImage,
    TopicImage,
    decode_broker,
    decode_cursor,
    decode_topic,
    encode_broker,
)
from broker.storage.named_files import named_files, read_named
from broker.storage.producers_file import ProducersImage, decode_producers
from broker.storage.records import Record, decode_record
from broker.storage.recurring import RecurringImage, decode_recurring
from broker.storage.segment import Group
from broker.topics.registry import Registry

OwnImage = TypeVar("OwnImage", ProducersImage, RecurringImage, BulkImage)


@dataclass(slots=True)
class Manifests:
    """Manifests of the broker and its topics, checked."""

    root: BrokerImage
    topics: list[TopicImage] = field(default_factory=list)
    cursors: dict[int, dict[int, CursorImage]] = field(default_factory=dict)
    amendments: dict[int, dict[int, Amendments]] = field(default_factory=dict)  # by topic, by ledger
    producers: dict[int, ProducersImage] = field(default_factory=dict)  # of topics that have a file of them
    recurring: dict[int, RecurringImage] = field(default_factory=dict)  # the same
    bulk: dict[int, BulkImage] = field(default_factory=dict)  # the same

    @property
    def needed_to_lsn(self) -> int:
        """The greatest lsn that a manifest holds: a journal that ends before it has lost something."""
        return max([self.root.checkpoint_lsn, *(topic.applied_lsn for topic in self.topics)])


def open_manifests(
    vfs: Vfs, layout: Layout, now_ms: int, shard: ShardName = NO_SHARD, *, first_id: int = 1
) -> Manifests:
    """Read all manifests; in an empty data directory, make the root, whose ids begin with `first_id`. Blocks."""
    _refuse_copies(vfs, layout)
    vfs.make_dir(layout.root)
    if not vfs.exists(layout.manifest):
        _refuse_rootless(vfs, layout)
        if not shard.text:
            vfs.make_dir(layout.journal)
        vfs.make_dir(layout.topics)
        vfs.sync_dir(layout.root)
        alive_ms = 0 if shard.text else now_ms
        root = BrokerImage(
            shard.broker_id or str(uuid.uuid4()), 0, {}, first_id, first_id, alive_ms, shard.text
        )
        replace_file(vfs, layout.manifest, [encode_broker(root)])
    manifests = Manifests(decode_broker(read_named(vfs, layout.manifest, _ADVICE), layout.manifest))
    _refuse_other_shards(layout, manifests.root, shard)
    for topic_id, name in manifests.root.topics.items():
        image = _read_topic(vfs, layout, topic_id, name)
        manifests.topics.append(image)
        manifests.cursors[topic_id] = _read_cursors(vfs, layout, image)
        manifests.amendments[topic_id] = read_amendments(vfs, layout, image)
        if image.producers_file:
            manifests.producers[topic_id] = _read_own(
                vfs, layout, topic_id, image.producers_file, decode_producers, "producers"
            )
        if image.recurring_file:
            manifests.recurring[topic_id] = _read_own(
                vfs, layout, topic_id, image.recurring_file, decode_recurring, "recurring schedules"
            )
        if image.bulk_file:
            manifests.bulk[topic_id] = _read_own(
                vfs, layout, topic_id, image.bulk_file, decode_bulk, "bulk changes"
            )
    return manifests


def cut_ledgers(vfs: Vfs, layout: Layout, manifests: Manifests) -> None:
    """Cut ledgers to what their manifests name, and check that they are that long. Blocks."""
    for image in manifests.topics:
        was_there = vfs.exists(layout.keys(image.topic_id))
        layout.make_topic_folders(vfs, image.topic_id)
        if (
            not was_there
        ):  # of a broker from before there were schedule keys: what it will hold must not be lost
            vfs.sync_dir(layout.topic(image.topic_id))
        for ledger in image.ledgers:
            capture = ledger.capture
            if not capture.sealed:
                cut_ledger(vfs, layout.ledgers(image.topic_id), capture)
            else:
                _check_lengths(vfs, capture.name(layout.ledgers(image.topic_id)), file_lengths(capture))


def sync_manifests(vfs: Vfs, layout: Layout, manifests: Manifests) -> None:
    """Make the manifests that were read durable under their names, before the next checkpoint relies on them. Blocks.

    A broker may have been killed between the rename of a manifest and the sync of its folder. A topic's that holds
    records above the root's lsn is one of a checkpoint that was cut short: nobody has synced its folder since, and if
    a power cut brought back the one before, a later root would have dropped those records from the journal.
    """
    vfs.sync_dir(layout.root)
    for image in manifests.topics:
        if image.applied_lsn > manifests.root.checkpoint_lsn:
            vfs.sync_dir(layout.topic(image.topic_id))


def remove_unnamed(vfs: Vfs, layout: Layout, manifests: Manifests, registry: Registry) -> None:
    """Remove what no manifest names, nor what was replayed. Blocks; doing it twice changes nothing.

    A topic's folder is synced before anything goes that the manifest before may name: `sync_manifests` leaves out those
    whose manifest holds no more records than the root.
    """
    for image in manifests.topics:
        _remove_unnamed_of_topic(vfs, layout, image, registry)
    if vfs.exists(layout.staging):  # no job has a lease from before
        remove_tree(vfs, layout.staging)
    if vfs.exists(layout.pins):  # of a backup that was being made
        remove_tree(vfs, layout.pins)
    known = {str(topic_id) for topic_id in manifests.root.topics}
    for name in vfs.list_dir(layout.topics):
        if name not in known:
            remove_tree(vfs, f"{layout.topics}/{name}")


def replay_journal(journal: Journal, from_lsn: int, registry: Registry) -> int:
    """Apply every record from `from_lsn` on; returns how many there were. Blocks."""
    count = 0
    for lsn, record_type, body in journal.replay(from_lsn):
        registry.apply(decode_record(record_type, body), lsn)
        count += 1
    return count


def decode_group(group: Group) -> Iterator[tuple[int, Record]]:
    """The records of a group that have an effect, with their lsns. Raises Corrupt."""
    for lsn, record_type, body in records_from([group], group.first_lsn):
        yield lsn, decode_record(record_type, body)


def _refuse_other_shards(layout: Layout, root: BrokerImage, shard: ShardName) -> None:
    """A log that is not the folder's own would be applied to what it knows nothing of (CLUSTER-6)."""
    if root.shard == shard.text:
        return
    raise Fenced(
        f"The data directory {layout.root!r} belongs to {root.shard or 'a broker without a cluster'}, not to "
        f"{shard.text or 'a broker without a cluster'}: choose another data_dir, or correct cluster_store",
        reason="DATA_DIR_OF_ANOTHER_SHARD",
    )


def _refuse_copies(vfs: Vfs, layout: Layout) -> None:
    """Of a backup nothing may change, and of half a copy nobody may take it for the whole."""
    if vfs.exists(layout.backup_marker):
        raise Fenced(
            f"{layout.root!r} is a backup, which is read-only: run `postdate-broker restore` to make a data "
            "directory from it",
            reason="DATA_DIR_IS_BACKUP",
        )
    if vfs.exists(layout.unfinished):
        raise Fenced(
            f"{layout.root!r} is incomplete: it is part of a backup, or a restore was interrupted. Run "
            "`postdate-broker restore` again",
            reason="COPY_UNFINISHED",
        )


def _refuse_rootless(vfs: Vfs, layout: Layout) -> None:
    """Without the root, a directory that holds a journal or topics is damaged, not new: never start empty."""
    if not is_unused(vfs, layout):
        raise Corrupt(
            "broker.manifest is missing, but there is data beside it",
            path=layout.manifest,
            advice=_ADVICE,
        )


def _read_topic(vfs: Vfs, layout: Layout, topic_id: int, name: str) -> TopicImage:
    path = layout.topic_manifest(topic_id)
    image = decode_topic(read_named(vfs, path, _ADVICE), path)
    if image.topic_id != topic_id or image.name != name:
        raise Corrupt(
            f"Found the manifest of topic {image.topic_id} {image.name!r} in place of that of topic {topic_id} "
            f"{name!r}",
            path=path,
            advice=_ADVICE,
        )
    return image


def _read_cursors(vfs: Vfs, layout: Layout, image: TopicImage) -> dict[int, CursorImage]:
    cursors = {}
    for subscription in image.subscriptions:
        if not subscription.cursor_file:
            continue
        path = f"{layout.cursors(image.topic_id)}/{subscription.cursor_file}"
        cursor = decode_cursor(read_named(vfs, path, _ADVICE), path)
        if (cursor.topic_id, cursor.subscription_id) != (image.topic_id, subscription.subscription_id):
            raise Corrupt("A cursor belongs to another subscription", path=path, advice=_ADVICE)
        cursors[subscription.subscription_id] = cursor
    return cursors


def read_amendments(vfs: Vfs, layout: Layout, image: TopicImage) -> dict[int, Amendments]:
    """Read the amendments by ledger; raises Corrupt. Blocks."""
    amendments = {}
    for ledger in image.ledgers:
        if not ledger.amendments_file:
            continue
        path = f"{layout.ledgers(image.topic_id)}/{ledger.amendments_file}"
        file = decode_amendments(read_named(vfs, path, _ADVICE), path)
        if (file.topic_id, file.ledger_id) != (image.topic_id, ledger.ledger_id):
            raise Corrupt("An amendments file belongs to another ledger", path=path, advice=_ADVICE)
        amendments[ledger.ledger_id] = file.amendments
    return amendments


def _read_own(
    vfs: Vfs, layout: Layout, topic_id: int, file: str, decode: Callable[[bytes, str], OwnImage], what: str
) -> OwnImage:
    """Read a file that a topic names for one of its components; raises Corrupt. Blocks."""
    path = f"{layout.cursors(topic_id)}/{file}"
    image = decode(read_named(vfs, path, _ADVICE), path)
    if image.topic_id != topic_id:
        raise Corrupt(f"A file of {what} belongs to another topic", path=path, advice=_ADVICE)
    return image


def _check_lengths(vfs: Vfs, name: LedgerName, lengths: dict[str, int]) -> None:
    for kind, length in lengths.items():
        path = name.path(kind)
        if not vfs.exists(path):
            raise Corrupt("A ledger file that a manifest names is missing", path=path, advice=_ADVICE)
        file = vfs.open(path)
        try:
            if file.size() != length:
                raise Corrupt(
                    f"A sealed ledger file holds {file.size()} bytes where the manifest names {length}",
                    path=path,
                    offset=min(length, file.size()),
                    advice=_ADVICE,
                )
        finally:
            file.close()


def _remove_unnamed_of_topic(vfs: Vfs, layout: Layout, image: TopicImage, registry: Registry) -> None:
    files = named_files(image)
    if topic := registry.topics.get(image.topic_id):  # generations that no manifest names yet
        names = [ledger.name for ledger in topic.log if ledger.name.generation]
        files["ledgers"] |= {name.file(kind) for name in names for kind in KINDS}
    root = layout.topic(image.topic_id)
    found = {f"{root}/{folder}/{name}" for folder in files for name in vfs.list_dir(f"{root}/{folder}")}
    if unnamed := found - {f"{root}/{folder}/{name}" for folder, names in files.items() for name in names}:
        vfs.sync_dir(root)
        for path in sorted(unnamed):
            vfs.remove(path)


_ADVICE = "Restore the data directory from a backup."
