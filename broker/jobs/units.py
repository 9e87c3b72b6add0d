"""One unit of an audit, checked: the same code in the driver, in a pool of processes and in a Spark task.

Damage in one file does not keep the others from being looked at. A disk that does not read is a finding too (not
checked), so that one bad topic never ends a run.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np

from broker.delayed.check import CursorView, Finding, IndexState, Kind, LedgerRows, RowFacts, ledger_facts
from broker.delayed.check.ledgers import Mask
from broker.errors import Corrupt, PostdateError
from broker.folder.consistency import find_amendment_problems, find_cursor_problems, find_index_problems
from broker.folder.index_check import IndexFilesCheck, LedgerSource, Scope, file_source
from broker.folder.key_check import find_key_problems
from broker.jobs.folder import reading_vfs
from broker.jobs.messages import compare_messages
from broker.jobs.values import LedgerLine, Level, TopicFinding, Unit, UnitResult
from broker.jobs.work import Work
from broker.model import Int64Column, RowColumn, ids_of
from broker.runtime.vfs import Vfs, list_if_there, size_if_there
from broker.storage.amendments import NONE, Amendments, decode_amendments
from broker.storage.blocks import LedgerCapture, block_count, file_lengths
from broker.storage.bucket_files import bucket_storage
from broker.storage.bulk import BulkImage, decode_bulk
from broker.storage.key_run_files import key_storage
from broker.storage.layout import Layout
from broker.storage.ledger_check import CompareFrames, verify_ledger
from broker.storage.ledger_files import open_checked
from broker.storage.manifest import (
    CursorImage,
    LedgerImage,
    SubscriptionImage,
    TopicImage,
    decode_cursor,
    decode_topic,
)
from broker.storage.named_files import named_files, read_named
from broker.storage.producers_file import ProducersImage, decode_producers
from broker.storage.recurring import RecurringImage, decode_recurring
from broker.storage.sparse_files import read_present

FINDINGS_MAX = 2_000
"""Findings of one unit beyond so many are counted and not listed; each may stand for many entries."""

_PROBLEMS_MAX = 100  # of one ledger
_RUN_BLOCKS = 64  # of schedule keys, read at once
_PINNED_RATIO = 0.1  # a sealed ledger with no more live entries keeps bytes that compaction would free
_PINNED_BYTES_MIN = 1 << 20
_ENTRIES_MAX = 8_000_000  # index entries in memory at once, should one ledger hold that many


def audit_unit(unit: Unit, vfs: Vfs | None = None) -> UnitResult:
    """Check a unit, and a second time if that led to findings: only what was found both times counts."""
    result = _tried(unit, vfs or reading_vfs(unit.folder))
    if not any(finding.finding.kind in _CONFIRMED for finding in result.findings):
        return result
    again = _tried(unit, vfs or reading_vfs(unit.folder, anew=True))
    first, second = set(result.findings), set(again.findings)
    if not _is_whole(again):  # it cannot clear what the first one found
        result.findings += [finding for finding in again.findings if finding not in first]
        return result
    vanished = [finding for finding in result.findings if finding not in second]
    # A first look that was cut short has found less, and for a reason.
    doubtful = {
        finding for finding in second - first if _is_whole(result) and finding.finding.kind in _CONFIRMED
    }
    again.findings = [_unconfirmed(finding) if finding in doubtful else finding for finding in again.findings]
    again.findings += map(_unconfirmed, vanished)
    return again


def check_unit(unit: Unit, vfs: Vfs) -> UnitResult:
    """Check a unit once. Raises OSError and PostdateError for a disk that does not read."""
    check = _UnitCheck(unit, vfs)
    check.run()
    return check.result


def _tried(unit: Unit, vfs: Vfs) -> UnitResult:
    """Check a unit once; a disk that does not read is a finding."""
    check = _UnitCheck(unit, vfs)
    try:
        check.run()
    except (OSError, PostdateError) as error:
        check.add(Finding(Kind.NOT_CHECKED, f"{type(error).__name__}: {error}"))
    return check.result


def _is_whole(result: UnitResult) -> bool:
    return all(finding.finding.kind is not Kind.NOT_CHECKED for finding in result.findings)


def failed_unit(unit: Unit, error: BaseException) -> UnitResult:
    """Of a unit that could not be checked."""
    what = f"the check of ledgers from {unit.first_ledger_id} on failed: {type(error).__name__}: {error}"
    return UnitResult(unit.topic, [TopicFinding(unit.topic, Finding(Kind.NOT_CHECKED, what))])


def _unconfirmed(doubtful: TopicFinding) -> TopicFinding:
    finding = replace(
        doubtful.finding, kind=Kind.UNCONFIRMED, what=f"{doubtful.finding.kind}: {doubtful.finding.what}"
    )
    return replace(doubtful, finding=finding)


AUDIT = Work(audit_unit, failed_unit, Unit.from_line, UnitResult.from_line)

_CONFIRMED = {kind for kind in Kind if kind not in (Kind.ORPHAN, Kind.STALE, Kind.PINNED, Kind.UNCONFIRMED)}


class _UnitCheck:
    def __init__(self, unit: Unit, vfs: Vfs) -> None:
        self._unit = unit
        self._vfs = vfs
        self._layout = Layout(unit.folder)
        self.result = UnitResult(unit.topic)
        self._facts: dict[int, RowFacts] = {}

    def run(self) -> None:
        if (image := self._read_manifest()) is not None:
            self._check(image)

    def add(self, finding: Finding, path: str = "") -> None:
        if len(self.result.findings) < FINDINGS_MAX:
            self.result.findings.append(TopicFinding(self._unit.topic, finding, path))
        else:
            self.result.left_out += 1

    def _add_state(self, problems: Iterator[str], path: str) -> None:
        """Add contradictions between manifest, cursors and amendments, once a topic."""
        for what in problems:
            if self._unit.is_first:
                self.add(Finding(Kind.STATE, what), path)

    def _read_manifest(self) -> TopicImage | None:
        """None if there is nothing to go by; the first unit says why."""
        unit, layout = self._unit, self._layout
        folder, path = layout.topic(unit.topic_id), layout.topic_manifest(unit.topic_id)
        # Never take an empty listing for an answer: a medium that is not there lists nothing too.
        if not self._vfs.exists(folder) or not self._vfs.list_dir(folder):
            if unit.is_first:
                self.add(
                    Finding(Kind.NOT_CHECKED, "the topic is known, and its folder is empty or gone"), folder
                )
            return None
        try:
            image = decode_topic(read_named(self._vfs, path), path)
        except Corrupt as error:
            if unit.is_first:
                self.add(Finding(Kind.of(error), error.message), path)
            return None
        if (image.topic_id, image.name) != (unit.topic_id, unit.topic):
            if unit.is_first:
                what = f"the manifest is of another topic, {image.topic_id} {image.name!r}"
                self.add(Finding(Kind.STATE, what), path)
            return None
        return image

    def _check(self, image: TopicImage) -> None:
        unit, layout = self._unit, self._layout
        topic_id = image.topic_id
        cursors = [self._read_cursor(image, cursor) for cursor in image.subscriptions]
        if unit.is_first:
            self._check_beside(image)
        ledgers = [
            ledger
            for ledger in image.ledgers
            if unit.first_ledger_id <= ledger.ledger_id <= unit.last_ledger_id
        ]
        sources = []
        for ledger in ledgers:
            amendments = self._read_amendments(image, ledger)
            self._check_files(ledger.capture, amendments)
            sources.append(self._source(image, ledger, amendments))
        storage = bucket_storage(self._vfs, layout.buckets(topic_id), topic_id)
        gone = frozenset(ledger_id for ledger_id, _ in image.gone_ledgers)
        state = IndexState(image.indexed_through, image.index_lsn, image.frontier_ms, gone)

        def look(rows: LedgerRows) -> None:
            self._facts[rows.ledger_id] = ledger_facts(rows, image.frontier_ms)

        scope = Scope(unit.first_ledger_id, unit.last_ledger_id, unit.level is Level.QUICK, look)
        check = IndexFilesCheck(storage.open_reader, state, sources, cursors, scope)
        findings, self.result.counts = check.run(image.bucket_ids, _ENTRIES_MAX)
        for finding in findings:
            bucket = finding.bucket_id
            self.add(finding, "" if bucket is None else storage.path(bucket))
        for ledger in ledgers:
            self._tell_ledger(ledger.capture)

    # -- what a topic has beside ledgers ---------------------------------------------------------------------

    def _check_beside(self, image: TopicImage) -> None:
        layout = self._layout
        folder = layout.topic(image.topic_id)
        self._add_state(find_index_problems(image), layout.topic_manifest(image.topic_id))
        named = named_files(image)
        self._find_orphans(folder, {"manifest", *named})
        for name, files in named.items():
            self._find_orphans(f"{folder}/{name}", files)
        self._check_file(image, image.producers_file, "producers", decode_producers)
        self._check_file(image, image.recurring_file, "recurring schedules", decode_recurring)
        self._check_file(image, image.bulk_file, "bulk changes", decode_bulk)
        self._check_key_runs(image)
        self.result.bucket_count = len(image.bucket_ids)
        paths = [f"{layout.buckets(image.topic_id)}/{bucket_id}.bucket" for bucket_id in image.bucket_ids]
        self.result.bucket_bytes = sum(size_if_there(self._vfs, path) for path in paths)

    def _check_file(
        self,
        image: TopicImage,
        file: str,
        what: str,
        decode: Callable[[bytes, str], BulkImage | ProducersImage | RecurringImage],
    ) -> None:
        if not file:
            return
        path = f"{self._layout.cursors(image.topic_id)}/{file}"
        try:
            if decode(read_named(self._vfs, path), path).topic_id != image.topic_id:
                self.add(Finding(Kind.STATE, f"a file of {what} belongs to another topic"), path)
        except Corrupt as error:
            self.add(Finding(Kind.of(error), error.message), path)

    def _check_key_runs(self, image: TopicImage) -> None:
        known = len(self.result.findings)
        runs = key_storage(self._vfs, self._layout.keys(image.topic_id), image.topic_id)
        for run_id in image.key_run_ids:
            try:
                with contextlib.closing(runs.open_reader(run_id)) as reader:
                    header = reader.read_header()
                    fences = reader.read_fences(header)
                    reader.read_filter(header)
                    for first in range(0, len(fences) if self._unit.level is Level.DEEP else 0, _RUN_BLOCKS):
                        reader.read_blocks(header, fences, first, min(first + _RUN_BLOCKS, len(fences)))
            except Corrupt as error:
                self.add(Finding(Kind.of(error), error.message), runs.path(run_id))
        if self._unit.level is Level.DEEP and len(self.result.findings) == known:
            amendments = {ledger.ledger_id: self._read_amendments(image, ledger) for ledger in image.ledgers}
            del self.result.findings[known:]  # who checks the ledgers says so again
            for what in find_key_problems(self._vfs, self._layout, image, amendments):
                self.add(Finding(Kind.STATE, what), self._layout.keys(image.topic_id))

    def _find_orphans(self, folder: str, named: set[str]) -> None:
        for name in list_if_there(self._vfs, folder):
            if name not in named:
                self.add(Finding(Kind.ORPHAN, "no manifest names this file"), f"{folder}/{name}")

    def _read_cursor(self, image: TopicImage, subscription: SubscriptionImage) -> CursorView:
        """Return the settled entries of a subscription; of an unreadable cursor, those before its mark."""
        cursor = CursorImage(image.topic_id, subscription.subscription_id, {}, {}, {})
        path = self._layout.topic_manifest(image.topic_id)
        if subscription.cursor_file:
            path = f"{self._layout.cursors(image.topic_id)}/{subscription.cursor_file}"
            try:
                cursor = decode_cursor(read_named(self._vfs, path), path)
            except Corrupt as error:
                if self._unit.is_first:
                    self.add(Finding(Kind.of(error), error.message), path)
                return CursorView(subscription.mark, {})
        if (cursor.topic_id, cursor.subscription_id) != (image.topic_id, subscription.subscription_id):
            self._add_state(iter(("a cursor belongs to another subscription",)), path)
            return CursorView(subscription.mark, {})
        self._add_state(find_cursor_problems(image, subscription, cursor), path)
        return CursorView(subscription.mark, cursor.settled)

    # -- ledgers ---------------------------------------------------------------------------------------------

    def _check_files(self, capture: LedgerCapture, amendments: Amendments | None) -> None:
        """Check that the files exist with their lengths; with `deep`, check their content."""
        blocks: set[int] = set()
        is_deep = self._unit.level is Level.DEEP
        if is_deep:
            blocks = _sampled(block_count(capture.row_count), self._unit, capture.ledger_id)
        folder = self._layout.ledgers(capture.topic_id)
        problems = verify_ledger(
            self._vfs,
            folder,
            capture,
            _PROBLEMS_MAX,
            blocks=blocks,
            compare=self._comparison(capture, amendments or NONE) if is_deep else None,
        )
        for problem in problems:
            what = f"{problem.what} (at offset {problem.offset})"
            self.add(Finding(Kind(problem.fault), what, ledger_id=capture.ledger_id), problem.path)
        self.result.rows_compared += min(len(blocks) * 4096, capture.row_count)

    def _comparison(self, capture: LedgerCapture, amendments: Amendments) -> CompareFrames:
        moved: Mask = np.zeros(capture.row_count, dtype=np.bool_)
        if (
            capture.sparse is not None
        ):  # its times are those that entries were moved to; messages say the first ones
            name = capture.name(self._layout.ledgers(capture.topic_id))
            with (
                contextlib.suppress(Corrupt),  # said by who checks the files
                contextlib.closing(open_checked(self._vfs, name, "times")) as file,
            ):
                moved = np.isin(ids_of(read_present(file, capture)), amendments.entry_ids)

        def compare(
            first: int, frames: list[bytes], rows: RowColumn, times: Int64Column
        ) -> Iterable[tuple[int, str]]:
            return compare_messages(frames, rows, times, moved[first : first + len(frames)])

        return compare

    def _source(self, image: TopicImage, ledger: LedgerImage, amendments: Amendments | None) -> LedgerSource:
        folder = self._layout.ledgers(image.topic_id)
        source = file_source(self._vfs, folder, ledger.capture, amendments)

        def read_times() -> Int64Column:
            try:
                return source.read_times()
            except Corrupt as error:
                problem = Finding(Kind.of(error), error.message, ledger_id=ledger.ledger_id)
                if problem.kind is Kind.CHECKSUM:  # the others were met before
                    self.add(problem, error.path)
                raise

        return replace(source, read_times=read_times)

    def _read_amendments(self, image: TopicImage, ledger: LedgerImage) -> Amendments | None:
        """Read the amendments of a ledger; None if they cannot be read."""
        if not ledger.amendments_file:
            return NONE
        path = f"{self._layout.ledgers(image.topic_id)}/{ledger.amendments_file}"
        try:
            file = decode_amendments(read_named(self._vfs, path), path)
        except Corrupt as error:
            self.add(Finding(Kind.of(error), error.message, ledger_id=ledger.ledger_id), path)
            return None
        if (file.topic_id, file.ledger_id) != (image.topic_id, ledger.ledger_id):
            what = "amendments belong to another ledger"
            self.add(Finding(Kind.STATE, what, ledger_id=ledger.ledger_id), path)
            return None
        for what in find_amendment_problems(image, ledger, file.amendments):
            self.add(Finding(Kind.STATE, what, ledger_id=ledger.ledger_id), path)
        return file.amendments

    def _tell_ledger(self, capture: LedgerCapture) -> None:
        facts = self._facts.get(capture.ledger_id)
        if facts is None:
            return
        file_bytes = sum(file_lengths(capture).values()) if capture.entry_count else 0
        self.result.ledgers.append(
            LedgerLine(self._unit.topic, facts, capture.sealed, capture.data_bytes, file_bytes)
        )
        stored = capture.row_count
        is_pinned = capture.sealed and 0 < facts.live <= _PINNED_RATIO * stored
        if is_pinned and file_bytes >= _PINNED_BYTES_MIN:
            what = f"{facts.live} live entries of {stored} keep {file_bytes} bytes"
            self.add(Finding(Kind.PINNED, what, facts.live, ledger_id=capture.ledger_id))


def _sampled(count: int, unit: Unit, ledger_id: int) -> set[int]:
    """Return which blocks of rows are looked at: always the same for one seed, and at least one."""
    if unit.sample >= 1 or not count:
        return set(range(count))
    chosen = random.Random(f"{unit.seed}.{ledger_id}")
    return set(chosen.sample(range(count), max(1, round(count * unit.sample))))
