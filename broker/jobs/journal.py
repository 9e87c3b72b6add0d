"""The end of the journal: what came after the manifests. Read as recovery would, and not applied.

A topic is audited at the moment its manifest was written, which its buckets belong to. Records above that are whole
or not, and continue the manifests or not: that is what is checked here. What they settled since is still counted as
pending; what they stored since is not indexed yet, and nothing is owed of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from broker.delayed.check import Finding, Kind
from broker.errors import Corrupt, PostdateError
from broker.folder.consistency import History, find_batch_problems
from broker.jobs.folder import Folder
from broker.jobs.values import TopicFinding
from broker.storage.group_log import records_from
from broker.storage.local_group_log import SegmentFolder
from broker.storage.manifest import BrokerImage, TopicImage
from broker.storage.records import Produced, decode_record

_FINDINGS_MAX = 1_000


@dataclass(slots=True)
class JournalResult:
    """Records of the journal that no manifest covers yet."""

    checked: bool = False  # it is not where a cluster has it
    records: int = 0
    messages: int = 0
    last_lsn: int = 0
    torn_bytes: int = 0  # of a last group that is not whole
    cut_roll: str = ""  # a segment that a crash cut in the making
    findings: list[TopicFinding] = field(default_factory=list)
    left_out: int = 0


def check_journal(folder: Folder, root: BrokerImage, images: Sequence[TopicImage]) -> JournalResult:
    """Blocks. `images`: of all topics, or the history of those that are missing cannot be followed."""
    result = JournalResult(checked=True)
    path = folder.layout.journal
    try:
        for kind, what in _problems(folder, root, images, result):
            if len(result.findings) < _FINDINGS_MAX:
                result.findings.append(TopicFinding("", Finding(kind, what), path))
            else:
                result.left_out += 1
    except Corrupt as error:
        result.findings.append(TopicFinding("", Finding(Kind.of(error), error.message), error.path or path))
    except (OSError, PostdateError) as error:
        result.findings.append(TopicFinding("", Finding(Kind.NOT_CHECKED, str(error)), path))
    return result


def _problems(
    folder: Folder, root: BrokerImage, images: Sequence[TopicImage], result: JournalResult
) -> Iterator[tuple[Kind, str]]:
    history = History(root, images)
    yield from ((Kind.STATE, what) for what in history.begin())
    if root.shard:
        result.checked, result.last_lsn = False, root.checkpoint_lsn
        return
    from_lsn = root.checkpoint_lsn + 1
    segments = SegmentFolder(folder.vfs, folder.layout.journal)
    examined = segments.examine(
        from_lsn, max([root.checkpoint_lsn, *(image.applied_lsn for image in images)])
    )
    result.last_lsn, result.torn_bytes = examined.next_lsn - 1, examined.torn_bytes
    result.cut_roll = examined.cut_roll or ""
    for lsn, record_type, body in records_from(segments.read(from_lsn, examined.next_lsn), from_lsn):
        result.records += 1
        try:
            record = decode_record(record_type, body)
        except Corrupt as error:
            yield Kind.CHECKSUM, f"lsn {lsn}: {error.message}"
            continue
        if isinstance(record, Produced):
            result.messages += len(record.times)
            yield from ((Kind.ROWS, f"lsn {lsn}: {what}") for what in find_batch_problems(record))
        yield from ((Kind.STATE, f"lsn {lsn}: {what}") for what in history.apply(lsn, record))
    yield from ((Kind.STATE, what) for what in history.end())
