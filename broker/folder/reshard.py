"""Resharding: the topics of a stopped broker's folder, given to another number of shards, by links.

    1  write a checkpoint of each shard there is (the caller does), so that no journal holds anything
    2  plan: which topic goes where, ids, whether dead letters lie beside their topics; refuse, or
    3  make the new folders beside those in use: link what never changes, copy ledgers that still grow; sync all
    4  write the marker of `shard_folders`: from here on the new ones count
    5  remove the old ones, and give the new ones their names

A crash before step 4 leaves the old folders in use, after it the new ones; what is left over is removed at the next
start. Into another folder there is no step 5, and the old ones stay.

A topic's files carry its id and those of its ledgers, which stay. So do lsns in them: each new folder goes on with an
lsn above all of them, and with ids above all that there are, in a range of its own (`topic_shards`).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from broker.errors import Corrupt, LimitReached, NotFound, Refused, Unavailable
from broker.folder.recovery import Manifests, open_manifests
from broker.folder.restore import NewDataDir, NewShardFolders, make_folders
from broker.folder.shard_folders import (
    lock_folder,
    new_shard_folder,
    read_shards,
    settle_shard_folders,
    shard_folder,
    write_shards,
)
from broker.folder.tree_copy import Steps, TreeCopy
from broker.model import LEDGER_ID_MAX
from broker.runtime.vfs import Vfs, list_if_there, replace_file
from broker.storage.alive import ABSENCES_MAX, Absence, Alive, read_alive, write_alive
from broker.storage.journal_copy import JournalCopy
from broker.storage.layout import Layout, is_unused
from broker.storage.local_group_log import SegmentFolder
from broker.storage.manifest import BrokerImage, encode_broker
from broker.topic_shards import ID_STRIDE, shard_of

_SEGMENT_BYTES = 1 << 20
_NAMED_MAX = 5


@dataclass(frozen=True, slots=True)
class NewShard:
    """Content of one of the new folders."""

    root: BrokerImage
    topics: tuple[dict[int, str], ...]  # of each old folder: names by id


def plan_reshard(sources: Sequence[Manifests], shards: int) -> list[NewShard]:
    """Return the new folders for the topics of old ones. Pure but for the ids of brokers. Raises Refused.

    What the old ones' journals hold is in their manifests.
    """
    _check_distinct(sources)
    _check_dead_letters(sources, shards)
    lsn = max(source.root.checkpoint_lsn for source in sources)
    topic_ids = _first_ids(max(source.root.next_topic_id for source in sources), shards)
    ledger_ids = _first_ids(max(source.root.next_ledger_id for source in sources), shards)
    if ledger_ids[-1] + ID_STRIDE > LEDGER_ID_MAX + 1:
        raise LimitReached(
            "The ids of ledgers are exhausted: the folder was resharded thousands of times",
            reason="LEDGER_IDS_EXHAUSTED",
        )
    alive_ms = max(source.root.last_alive_ms for source in sources)
    plans = []
    for number in range(shards):
        topics = tuple(
            {
                topic_id: name
                for topic_id, name in source.root.topics.items()
                if shards == 1 or shard_of(name, shards) == number
            }
            for source in sources
        )
        names = {topic_id: name for of_source in topics for topic_id, name in of_source.items()}
        root = BrokerImage(
            str(uuid.uuid4()),
            lsn,
            dict(sorted(names.items())),
            topic_ids[number],
            ledger_ids[number],
            alive_ms,
        )
        plans.append(NewShard(root, topics))
    return plans


def _first_ids(next_id: int, shards: int) -> list[int]:
    """Return the id with which each shard goes on, above all that were given."""
    if shards == 1:
        return [next_id]
    first = -(-(next_id - 1) // ID_STRIDE) * ID_STRIDE + 1
    return [first + number * ID_STRIDE for number in range(shards)]


def _check_distinct(sources: Sequence[Manifests]) -> None:
    """Refuse shards that gave the same ids: their topics' files cannot lie in one folder."""
    topics = [topic for source in sources for topic in source.topics]
    for ids in (
        [topic.topic_id for topic in topics],
        [ledger.ledger_id for topic in topics for ledger in topic.ledgers],
    ):
        if len(set(ids)) < len(ids):
            raise Refused(
                "Two shards use the same ids: the folder was made by a version of Postdate without reshard",
                reason="SHARDS_SHARE_IDS",
            )


def _check_dead_letters(sources: Sequence[Manifests], shards: int) -> None:
    """Refuse to part a topic from those that hold its dead letters: a message that moves is one record of both."""
    apart = sorted(
        {
            pair
            for pair in _dead_letter_topics(sources)
            if shard_of(pair[0], shards) != shard_of(pair[1], shards)
        }
    )
    if shards == 1 or not apart:
        return
    named = ", ".join(f"{place!r} of {topic!r}" for topic, place in apart[:_NAMED_MAX])
    more = f" and {len(apart) - _NAMED_MAX} more" if len(apart) > _NAMED_MAX else ""
    raise Refused(
        f"Dead-letter topics would be assigned to other shards than their topics: {named}{more}. Requeue or purge "
        "their dead letters and set another dead_letter_topic: a name that begins with that of the topic and a "
        '"~" is always in the shard of the topic',
        reason="DEAD_LETTER_TOPIC_ELSEWHERE",
    )


def _dead_letter_topics(sources: Sequence[Manifests]) -> Iterator[tuple[str, str]]:
    """Each topic with each other one that takes its dead letters, or holds some."""
    for source in sources:
        holder = {ledger.ledger_id: topic.name for topic in source.topics for ledger in topic.ledgers}
        for topic in source.topics:
            for subscription in topic.subscriptions:
                if subscription.policy.dead_letter_topic:
                    yield topic.name, subscription.policy.dead_letter_topic
                cursor = source.cursors[topic.topic_id].get(subscription.subscription_id)
                for ledger_id in cursor.dead_letters if cursor is not None else ():
                    if ledger_id in holder:
                        yield topic.name, holder[ledger_id]


def common_absences(alive: Sequence[Alive]) -> Alive:
    """Return what holds of several brokers: until when one was there, and when none was.

    In doubt a message is delivered, so a time in which any of them was there is no absence.
    """
    absences = alive[0].absences
    for other in alive[1:]:
        overlaps = (
            Absence(max(one.left_ms, two.left_ms), min(one.back_ms, two.back_ms))
            for one in absences
            for two in other.absences
        )
        absences = tuple(overlap for overlap in overlaps if overlap.left_ms < overlap.back_ms)[-ABSENCES_MAX:]
    return Alive(max(one.alive_ms for one in alive), absences)


class Reshard:
    """One folder on its way to another number of shards. `begin`, then `run`; `close` lets go of it. Blocks."""

    def __init__(self, vfs: Vfs, data_dir: str, shards: int, to: str | None = None) -> None:
        """`to`: the folder that is made; without it, the data directory itself changes."""
        self._vfs = vfs
        self._root = data_dir.rstrip("/") or "/"
        self._shards = shards
        self._to = to
        self._locks = contextlib.ExitStack()
        self._folders: list[str] = []
        self._old_shards = 0
        self.files = 0
        self.copied_bytes = 0

    def begin(self) -> list[str]:
        """Return the folders of the shards that there are, each of which is to be closed with a checkpoint.

        Finishes or removes what an earlier attempt left. Raises NotFound, Refused, Fenced, Corrupt, OSError.
        """
        vfs, root = self._vfs, self._root
        if not vfs.exists(root):
            raise NotFound(f"Folder {root!r} does not exist")
        if vfs.exists(f"{root}/shards"):
            raise Refused(
                f"{root!r} belongs to a node of a cluster, whose number of shards cannot be changed",
                reason="CLUSTER_FOLDER",
            )
        with contextlib.ExitStack() as held:
            held.callback(lock_folder(vfs, root).close)
            settle_shard_folders(vfs, root)
            shards = read_shards(vfs, root)
            folders = [shard_folder(root, number) for number in range(shards)] if shards else [root]
            if (shards or 1) == self._shards:
                raise Refused(f"{root!r} already has {self._shards} shards", reason="SAME_SHARD_COUNT")
            for folder in folders if shards and self._to is None else ():
                if list_if_there(vfs, f"{folder}/backups"):
                    raise Refused(
                        f"{folder}/backups holds backups of this shard, which would be removed with its folder: move "
                        "them elsewhere, or delete them",
                        reason="BACKUPS_IN_THE_WAY",
                    )
            if shards:  # without shards, whoever writes the checkpoint holds this lock
                self._locks = held.pop_all()
        self._old_shards = shards
        self._folders = [folder for folder in folders if not is_unused(vfs, Layout(folder))]
        if not self._folders:
            raise NotFound(f"{root!r} is not a data directory: it contains no files of a broker")
        return self._folders

    def run(self) -> list[NewShard]:
        """Make and use the new folders; returns what is in them. Raises as `begin` does, and LimitReached."""
        vfs = self._vfs
        sources = []
        for folder in self._folders:
            lock = lock_folder(vfs, folder)
            self._locks.callback(lock.close)
            sources.append(_read_closed(vfs, Layout(folder)))
        plans = plan_reshard(sources, self._shards)
        if self._to is None:
            self._replace(sources, plans)
        elif self._shards == 1:
            target = NewDataDir(vfs, self._to)
            with target.being_made():
                self._fill(target.layout, plans[0], sources)
                target.finish(plans[0].root, plans[0].root.broker_id)
        else:
            new = NewShardFolders(vfs, self._to, self._shards)
            with new.being_made():
                self._make(new.folders, plans, sources)
                new.finish()
        return plans

    def close(self) -> None:
        """Let go of all folders."""
        self._locks.close()

    def _replace(self, sources: Sequence[Manifests], plans: Sequence[NewShard]) -> None:
        vfs, root = self._vfs, self._root
        if self._shards == 1:
            layout = Layout(root)
            write_shards(vfs, root, self._old_shards, is_joining=True)
            make_folders(vfs, layout)
            self._fill(layout, plans[0], sources)
            replace_file(vfs, layout.manifest, [encode_broker(plans[0].root)])
        else:
            folders = [new_shard_folder(root, number) for number in range(self._shards)]
            self._make(folders, plans, sources)
        vfs.sync_dir(root)
        write_shards(vfs, root, self._shards, is_moving=True)
        settle_shard_folders(vfs, root)

    def _make(self, folders: Sequence[str], plans: Sequence[NewShard], sources: Sequence[Manifests]) -> None:
        vfs = self._vfs
        for folder, plan in zip(folders, plans, strict=True):
            layout = Layout(folder)
            vfs.make_dir(folder)
            make_folders(vfs, layout)
            self._fill(layout, plan, sources)
            replace_file(vfs, layout.manifest, [encode_broker(plan.root)])
        vfs.sync_dir(folders[0].rpartition("/")[0] or ".")

    def _fill(self, target: Layout, plan: NewShard, sources: Sequence[Manifests]) -> None:
        """Make all of a new folder but its root manifest, durably."""
        vfs = self._vfs
        for folder, source, topics in zip(self._folders, sources, plan.topics, strict=True):
            copy = TreeCopy(vfs, Layout(folder), target, reserve_bytes=0)
            exhaust(copy.topics(replace(source.root, topics=topics)))
            self.files += copy.files
            self.copied_bytes += copy.copied_bytes
        lsn = plan.root.checkpoint_lsn
        exhaust(JournalCopy(vfs, "", target.journal, lsn + 1, lsn, _SEGMENT_BYTES).steps())
        # Without a file no topic of the folder deals with absences.
        alive = [found for folder in self._folders if (found := _read_alive(vfs, Layout(folder))) is not None]
        if alive:
            write_alive(vfs, target.alive, common_absences(alive), durable=True)


def exhaust(steps: Steps) -> None:
    """Go all steps of a copy."""
    for _ in steps:
        pass


def _read_closed(vfs: Vfs, layout: Layout) -> Manifests:
    """Read the manifests of a folder that was closed with a checkpoint; Unavailable if its journal holds more."""
    manifests = open_manifests(vfs, layout, 0)
    checkpoint_lsn = manifests.root.checkpoint_lsn
    journal = SegmentFolder(vfs, layout.journal).examine(checkpoint_lsn + 1, manifests.needed_to_lsn)
    if journal.next_lsn != checkpoint_lsn + 1 or manifests.needed_to_lsn > checkpoint_lsn:
        raise Unavailable(f"The final checkpoint of {layout.root!r} failed: see the log, and try again")
    return manifests


def _read_alive(vfs: Vfs, layout: Layout) -> Alive | None:
    try:
        return read_alive(vfs, layout.alive)
    except Corrupt:  # as at a start: what the root says counts then, and in doubt nobody was away
        return Alive(0)
