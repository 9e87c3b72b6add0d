"""Plan of an audit: reads the manifests and the beginnings of buckets, and cuts the work into units.

The buckets of a topic were made from parts of its log, so the ledgers between two ids need few of them: units of a
topic read little twice, and nothing has to travel between them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from broker.delayed.check import Finding, Kind, plan_passes
from broker.errors import Corrupt, NotFound, PostdateError
from broker.folder.index_check import estimate_entries
from broker.jobs.folder import Folder
from broker.jobs.values import Level, TopicFinding, Unit
from broker.model import LEDGER_ID_MAX
from broker.runtime.vfs import list_if_there
from broker.storage.bucket_files import bucket_storage
from broker.storage.bucket_snapshot import BucketMetadata
from broker.storage.local_group_log import SEGMENT_NAME, SPARE_NAME
from broker.storage.manifest import BrokerImage, TopicImage, decode_broker, decode_topic
from broker.storage.named_files import read_named

UNIT_WEIGHT_MAX = 4_000_000
"""Rows and index entries of one unit, about: it keeps some 30 bytes of memory for each."""

_ROOT_NAMES = {
    "alive",
    "backup.json",
    "backup.pins",
    "backups",
    "broker.manifest",
    "journal",
    "lock",
    "staging",
    "topics",
}
_TOPIC_WEIGHT = 2_000  # of opening the files of a topic that holds nothing


@dataclass(slots=True)
class Plan:
    """Units to check, and what was found out before anything was checked."""

    root: BrokerImage | None
    images: list[TopicImage] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    findings: list[TopicFinding] = field(default_factory=list)


def plan_audit(
    folder: Folder, topics: Collection[str], level: Level, sample: float = 1.0, seed: int = 0
) -> Plan:
    """Blocks. `topics`: these alone, or all there are if there are none. Raises NotFound for one that is not there.

    What cannot be read here leads to findings; the unit of a topic then says what else is wrong with it.
    """
    plan = Plan(None)
    known = _read_topics(folder, plan)
    if missing := sorted(set(topics) - set(known.values())):
        raise NotFound(f"There is no topic {missing[0]!r} in {folder.path!r}")
    if not topics:
        plan.findings += _orphans(folder, known)
    for topic_id, name in known.items():
        if topics and name not in topics:
            continue
        ranges = _ranges(folder, topic_id, name, plan)
        plan.units += [
            Unit(folder.path, topic_id, name, first, last, weight, level, sample, seed + number)
            for number, (first, last, weight) in enumerate(ranges)
        ]
    return plan


def _read_topics(folder: Folder, plan: Plan) -> dict[int, str]:
    """The topics there are, by id. Without the root: those that there are folders of."""
    path = folder.layout.manifest
    if not folder.vfs.exists(path) and not _numbered(folder):
        raise NotFound(f"Nothing was ever stored in {folder.path!r}")
    try:
        plan.root = decode_broker(read_named(folder.vfs, path), path)
        return plan.root.topics
    except Corrupt as error:
        plan.findings.append(TopicFinding("", Finding(Kind.of(error), error.message), path))
    names = {}
    for topic_id in _numbered(folder):
        path = folder.layout.topic_manifest(topic_id)
        names[topic_id] = str(topic_id)
        with contextlib.suppress(Corrupt):
            names[topic_id] = decode_topic(read_named(folder.vfs, path), path).name
    return names


def _numbered(folder: Folder) -> list[int]:
    path = folder.layout.topics
    names = list_if_there(folder.vfs, path)
    return sorted(int(name) for name in names if name.isdigit())


def _orphans(folder: Folder, topics: Collection[int]) -> Iterator[TopicFinding]:
    """Report files and folders that no manifest names."""
    layout = folder.layout
    journal = list_if_there(folder.vfs, layout.journal)
    for parent, named in (
        (layout.root, _ROOT_NAMES),
        (layout.topics, set(map(str, topics))),
        (layout.staging, set()),
        (
            layout.journal,
            {name for name in journal if SEGMENT_NAME.fullmatch(name) or SPARE_NAME.fullmatch(name)},
        ),
    ):
        for name in list_if_there(folder.vfs, parent):
            if name not in named:
                finding = Finding(Kind.ORPHAN, "nothing names this")
                yield TopicFinding("", finding, f"{parent}/{name}")


def _ranges(folder: Folder, topic_id: int, name: str, plan: Plan) -> list[tuple[int, int, int]]:
    """Ranges of ledger ids that cover all of them, with their weights."""
    path = folder.layout.topic_manifest(topic_id)
    try:
        image = decode_topic(read_named(folder.vfs, path), path)
    except (Corrupt, OSError):
        return [(0, LEDGER_ID_MAX, _TOPIC_WEIGHT)]  # the unit meets it again, and says so
    if (image.topic_id, image.name) != (topic_id, name):
        return [(0, LEDGER_ID_MAX, _TOPIC_WEIGHT)]  # here too
    plan.images.append(image)
    weights = {ledger.ledger_id: ledger.capture.entry_count for ledger in image.ledgers}
    for ledger_id, count in estimate_entries(_read_buckets(folder, image)):
        weights[ledger_id] = weights.get(ledger_id, 0) + count
    ranges = plan_passes(sorted(weights.items()), UNIT_WEIGHT_MAX)
    return [
        (first, last, _TOPIC_WEIGHT + sum(w for i, w in weights.items() if first <= i <= last))
        for first, last in ranges
    ]


def _read_buckets(folder: Folder, image: TopicImage) -> list[BucketMetadata]:
    storage = bucket_storage(folder.vfs, folder.layout.buckets(image.topic_id), image.topic_id)
    buckets = []
    for bucket_id in image.bucket_ids:
        # What is wrong with it is said by the unit that checks it.
        with contextlib.suppress(PostdateError), contextlib.closing(storage.open_reader(bucket_id)) as reader:
            buckets.append(reader.read_metadata())
    return buckets
