"""Verification of a stopped broker's data directory: the deep audit, in this process and without a report.

A *problem* is what the audit calls an error, or could not look at: recovery would refuse it, or could not notice it
before a message is read, or no history of the broker leads to it. A *note* is what a crash may leave and the next start
cleans up: torn tails, files that nobody names. Nothing is changed, but the lock file is made if it is not there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from broker.delayed.check import Kind, Severity
from broker.errors import Corrupt, Fenced, NotFound, Unavailable
from broker.folder.shard_folders import read_shards, shard_folder
from broker.jobs.folder import DATA_DIR, Folder, pin_folders, reading_vfs
from broker.jobs.journal import JournalResult, check_journal
from broker.jobs.plan import Plan, plan_audit
from broker.jobs.units import check_unit
from broker.jobs.values import Level
from broker.runtime.vfs import Vfs, list_if_there, size_if_there
from broker.storage.blocks import file_lengths
from broker.storage.layout import Layout, is_unused
from broker.storage.manifest import decode_broker
from broker.storage.named_files import read_named
from broker.topic_shards import TopicShard, shard_of

LINES_MAX = 1000
"""Problems and notes beyond so many are counted and not listed."""

_NOT_TOLD = (Kind.PINNED, Kind.STALE)  # compaction's business


@dataclass(frozen=True, slots=True)
class Report:
    """Result of a verification. No problems: the broker starts, and every stored message can be read."""

    problems: list[str]
    notes: list[str]
    summary: str


def verify_data_dir(vfs: Vfs, data_dir: str) -> Report:
    """Check everything below a data directory. Blocks.

    Raises NotFound if it is none, Fenced if a broker runs on it, OSError and Unavailable if it cannot be read.
    """
    layout = Layout(data_dir.rstrip("/") or "/")
    if not any(map(vfs.exists, (layout.manifest, layout.journal, layout.topics, layout.lock))):
        raise NotFound(f"{data_dir!r} is not a data directory: it contains no files of a broker")
    lock = vfs.lock(layout.lock)
    if lock is None:
        raise Fenced(f"A broker is running on {data_dir!r}: stop it first", reason="DATA_DIR_LOCKED")
    try:
        return _verify(Folder(layout.root, DATA_DIR, vfs))
    finally:
        lock.close()


def verify_folder(vfs: Vfs, data_dir: str) -> Report:
    """Check a data directory as `verify_data_dir` does, or that of a broker with several shards: each of theirs.

    Also raises Refused and Corrupt, if it cannot be told which they are.
    """
    shards = read_shards(vfs, data_dir)
    if not shards:
        return verify_data_dir(vfs, data_dir)
    layout = Layout(data_dir.rstrip("/"))
    lock = vfs.lock(layout.lock)
    if lock is None:
        raise Fenced(f"A broker is running on {data_dir!r}: stop it first", reason="DATA_DIR_LOCKED")
    is_backup = vfs.exists(layout.backup_marker)
    try:
        reports = [
            _verify_shard(vfs, data_dir, TopicShard(number, shards), is_backup=is_backup)
            for number in range(shards)
        ]
    finally:
        lock.close()
    return _merge(reports)


def verify_store(url: str) -> Report:
    """Check a backup in an object store where it lies, of a broker with several shards each part.

    Raises NotFound if it is none, Corrupt if it cannot be told what it consists of, ConfigError, OSError and
    Unavailable if it cannot be read.
    """
    parts = pin_folders(url)
    if len(parts) == 1:
        return verify_data_dir(reading_vfs(parts[0]), parts[0])
    return _merge([_verify_part(part, TopicShard(number, len(parts))) for number, part in enumerate(parts)])


def _merge(reports: Sequence[Report]) -> Report:
    return Report(
        [problem for report in reports for problem in report.problems],
        [note for report in reports for note in report.notes],
        "\n".join(report.summary for report in reports),
    )


def _verify_shard(vfs: Vfs, data_dir: str, shard: TopicShard, *, is_backup: bool) -> Report:
    """Check one shard; what is reported begins with its name."""
    folder = shard_folder(data_dir, shard.number)
    if not is_unused(vfs, Layout(folder)):
        return _verify_used(vfs, folder, shard)
    if is_backup:  # of which every shard has its part
        return _named(shard, Report([f"The part of this shard is missing ({folder})"], [], "missing"))
    return _named(shard, Report([], ["Nothing was ever stored here"], "nothing"))


def _verify_part(part: str, shard: TopicShard) -> Report:
    """Check the base of one shard; what is reported begins with its name."""
    try:
        vfs = reading_vfs(part)
    except NotFound:
        return _named(shard, Report([f"The part of this shard is missing ({part})"], [], "missing"))
    except Corrupt as error:
        return _named(shard, Report([error.message], [], "damaged"))
    return _verify_used(vfs, part, shard)


def _verify_used(vfs: Vfs, folder: str, shard: TopicShard) -> Report:
    report = verify_data_dir(vfs, folder)
    problems = [*report.problems, *_misplaced(vfs, folder, shard)]
    return _named(shard, replace(report, problems=problems))


def _named(shard: TopicShard, report: Report) -> Report:
    name = f"shard {shard.number}"
    return Report(
        [f"{name}: {problem}" for problem in report.problems],
        [f"{name}: {note}" for note in report.notes],
        f"{name}: {report.summary}",
    )


def _misplaced(vfs: Vfs, folder: str, shard: TopicShard) -> Iterator[str]:
    """Report topics that no call would find here."""
    path = Layout(folder).manifest
    with contextlib.suppress(Corrupt):  # which has been reported
        for topic in decode_broker(read_named(vfs, path), path).topics.values():
            if not shard.holds(topic):
                yield f"Topic {topic!r} belongs to shard {shard_of(topic, shard.shards)} ({folder})"


def _verify(folder: Folder) -> Report:
    vfs, layout = folder.vfs, folder.layout
    problems, notes = [], []
    plan, journal = Plan(None), JournalResult()
    if vfs.exists(layout.unfinished):
        problems.append(
            f"This is a copy that did not come to its end; no broker starts from it ({layout.root})"
        )
    if vfs.exists(layout.manifest) or list_if_there(vfs, layout.topics):
        plan = plan_audit(folder, (), Level.DEEP)
        if plan.root is None:
            notes.append("Without broker.manifest the journal cannot be checked")
        else:
            journal = check_journal(folder, plan.root, plan.images)
            notes += _journal_notes(folder, journal)
            if plan.root.shard:
                notes.append(
                    f"What came after lsn {journal.last_lsn} lies in the log of {plan.root.shard} and is not checked"
                )
        notes += _surplus(folder, plan)
    elif list_if_there(vfs, layout.journal):
        problems.append(f"A file that a manifest names is missing ({layout.manifest})")
    else:
        notes.append("Nothing was ever stored here")
    results = [check_unit(unit, vfs) for unit in plan.units]
    for finding in [
        *plan.findings,
        *(finding for result in results for finding in result.findings),
        *journal.findings,
    ]:
        if finding.severity is not Severity.WARNING:
            problems.append(str(finding))
        elif finding.finding.kind not in _NOT_TOLD:
            notes.append(str(finding))
    problem_count = len(problems) + journal.left_out + sum(result.left_out for result in results)
    ledgers = [ledger for image in plan.images for ledger in image.ledgers]
    summary = (
        f"{len({unit.topic_id for unit in plan.units})} topics, {len(ledgers)} ledgers with "
        f"{sum(ledger.capture.entry_count for ledger in ledgers)} entries, "
        f"{sum(len(image.subscriptions) for image in plan.images)} subscriptions, "
        f"{journal.records} journal records: {problem_count} problems, {len(notes)} notes"
    )
    return Report(_listed(problems, problem_count), _listed(notes, len(notes)), summary)


def _journal_notes(folder: Folder, journal: JournalResult) -> Iterator[str]:
    for finding in journal.findings:
        if finding.finding.kind is Kind.NOT_CHECKED:
            raise Unavailable(finding.finding.what)
    if journal.cut_roll:
        yield f"A crash cut the making of this segment ({journal.cut_roll})"
    # What else follows the last group is the rest of a recycled file: every clean stop leaves that.
    if journal.torn_bytes:
        yield (
            f"The journal's last group is not whole, {journal.torn_bytes} bytes of it are there: a crash cut it before "
            f"anybody was answered, or it was damaged since; the next start drops it ({folder.layout.journal})"
        )


def _surplus(folder: Folder, plan: Plan) -> Iterable[str]:
    """Bytes that a crash left behind those that manifests name."""
    for image in plan.images:
        path = folder.layout.ledgers(image.topic_id)
        for capture in [ledger.capture for ledger in image.ledgers if not ledger.capture.sealed]:
            for kind, length in file_lengths(capture).items():
                file = capture.name(path).path(kind)
                surplus = size_if_there(folder.vfs, file) - (length if capture.entry_count else 0)
                if surplus > 0:
                    yield f"{surplus} bytes follow what the manifest names; the next start cuts them ({file})"


def _listed(lines: Sequence[str], count: int) -> list[str]:
    listed = list(lines[:LINES_MAX])
    return [*listed, f"... and {count - len(listed)} more"] if count > len(listed) else listed
