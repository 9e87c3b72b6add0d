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
from broker.jobs.folder import Folder
from broker.jobs.values import TopicFinding
from broker.runtime.clock import SystemClock
from broker.storage.journal_files import JournalFiles
from broker.storage.manifest import BrokerImage, TopicImage
from broker.storage.records import Produced, decode_record
from broker.topics.consistency import History, find_batch_problems

_FINDINGS_MAX = 1_000


@dataclass(slots=True)
class JournalResult:
    """What lies above the manifests."""

    checked: bool = False
    records: int = 0
    messages: int = 0
    last_lsn: int = 0
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
    from_lsn = root.checkpoint_lsn + 1
    files = JournalFiles(
        folder.vfs, folder.layout.journal, segment_bytes=0, spare_segments_max=0, clock=SystemClock()
    )
    found = files.examine(from_lsn, max([root.checkpoint_lsn, *(image.applied_lsn for image in images)]))
    result.last_lsn = files.recovered_lsn
    for lsn, record_type, body in () if found.is_new else files.replay(from_lsn):
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
