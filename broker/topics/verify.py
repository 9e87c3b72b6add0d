"""Checks the data directory of a stopped broker: whether its files are whole, and agree with each other.

A *problem* is what recovery would refuse, what it could not notice before a message is read, or state that no
history of the broker leads to. A *note* is what a crash may leave and the next start cleans up: torn tails,
files that nobody names. Nothing is changed, except that the lock file is made if it is not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from broker.delayed.bucket_storage import LocalBucketStorage
from broker.delayed.check import CursorView, IndexState
from broker.errors import Corrupt, Fenced, NotFound
from broker.runtime.clock import SystemClock
from broker.runtime.vfs import Vfs, list_if_there, size_if_there
from broker.storage.amendments import NONE, Amendments, decode_amendments
from broker.storage.blocks import KINDS, LedgerCapture, file_lengths
from broker.storage.journal_files import SEGMENT_NAME, SPARE_NAME, JournalFiles
from broker.storage.layout import Layout
from broker.storage.ledger_check import verify_ledger
from broker.storage.manifest import (
    BrokerImage,
    CursorImage,
    LedgerImage,
    SubscriptionImage,
    TopicImage,
    decode_broker,
    decode_cursor,
    decode_topic,
)
from broker.storage.named_files import ledger_capture
from broker.storage.records import Produced, decode_record
from broker.topics.consistency import (
    History,
    find_amendment_problems,
    find_batch_problems,
    find_cursor_problems,
    find_index_problems,
)
from broker.topics.index_check import check_index, file_source
from broker.topics.key_check import find_key_problems
from broker.topics.recovery import read_amendments, read_file, read_producers

LINES_MAX = 1000
"""Problems and notes beyond so many are counted and not listed."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was found. No problems: the broker starts, and every stored message can be read."""

    problems: list[str]
    notes: list[str]
    summary: str


def verify_data_dir(vfs: Vfs, data_dir: str) -> Report:
    """Check everything below a data directory. Blocks.

    Raises NotFound if it is none, Fenced if a broker runs on it, OSError if it cannot be read.
    """
    layout = Layout(data_dir.rstrip("/") or "/")
    if not any(map(vfs.exists, (layout.manifest, layout.journal, layout.topics, layout.lock))):
        raise NotFound(f"{data_dir!r} is not a data directory: nothing of a broker is in it")
    lock = vfs.lock(layout.lock)
    if lock is None:
        raise Fenced(f"A broker is running on {data_dir!r}: stop it first", reason="DATA_DIR_LOCKED")
    try:
        return _Verification(vfs, layout).run()
    finally:
        lock.close()


class _Findings:
    """Problems or notes: all counted, the first ones kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def add(self, line: str) -> None:
        self.count += 1
        if self.count <= LINES_MAX:
            self.lines.append(line)

    def listed(self) -> list[str]:
        left_out = self.count - len(self.lines)
        return [*self.lines, f"... and {left_out} more"] if left_out else self.lines


class _Verification:
    """One look at one data directory. Damage in one file does not keep the others from being looked at."""

    def __init__(self, vfs: Vfs, layout: Layout) -> None:
        self._vfs = vfs
        self._layout = layout
        self._problems = _Findings()
        self._notes = _Findings()
        self._ledger_count = 0
        self._entry_count = 0
        self._subscription_count = 0
        self._record_count = 0

    def run(self) -> Report:
        layout = self._layout
        known = {"lock", "broker.manifest", "alive", "backup.json", "backups", "journal", "topics", "staging"}
        self._note_others(layout.root, known)
        self._note_others(layout.staging, set())
        if self._vfs.exists(layout.unfinished):
            self._problems.add(
                f"This is a copy that did not come to its end; no broker starts from it ({layout.root})"
            )
        root = self._read_root()
        topic_ids = (
            root.topics if root else [int(name) for name in self._names(layout.topics) if name.isdigit()]
        )
        self._note_others(layout.topics, {str(topic_id) for topic_id in topic_ids})
        images = [image for topic_id in topic_ids if (image := self._check_topic(topic_id, root))]
        if root is not None:
            self._check_journal(root, images)
        return self._report(len(topic_ids))

    def _report(self, topic_count: int) -> Report:
        summary = (
            f"{topic_count} topics, {self._ledger_count} ledgers with {self._entry_count} entries, "
            f"{self._subscription_count} subscriptions, {self._record_count} journal records: "
            f"{self._problems.count} problems, {self._notes.count} notes"
        )
        return Report(self._problems.listed(), self._notes.listed(), summary)

    def _read_root(self) -> BrokerImage | None:
        layout = self._layout
        if not self._vfs.exists(layout.manifest) and not self._names(layout.journal) + self._names(
            layout.topics
        ):
            self._notes.add("Nothing was ever stored here")
            return None
        try:
            return decode_broker(read_file(self._vfs, layout.manifest), layout.manifest)
        except Corrupt as error:
            self._problems.add(error.message)
            self._notes.add("Without broker.manifest the journal cannot be checked")
            return None

    def _folders_of_topics(self) -> list[int]:
        return [int(name) for name in self._names(self._layout.topics) if re.fullmatch("[1-9][0-9]*", name)]

    # -- one topic -------------------------------------------------------------------------------------------

    def _check_topic(self, topic_id: int, root: BrokerImage | None) -> TopicImage | None:
        layout = self._layout
        path = layout.topic_manifest(topic_id)
        try:
            image = decode_topic(read_file(self._vfs, path), path)
        except Corrupt as error:
            self._problems.add(error.message)
            return None
        if image.topic_id != topic_id or (root is not None and image.name != root.topics[topic_id]):
            self._problems.add(f"The manifest is of another topic, {image.topic_id} {image.name!r} ({path})")
            return None
        for ledger in image.ledgers:
            self._check_ledger(ledger_capture(ledger, topic_id))
        cursors = [self._check_subscription(image, subscription) for subscription in image.subscriptions]
        self._check_index(image, cursors)
        self._check_keys(image)
        self._note_others(layout.topic(topic_id), {"manifest", "ledgers", "cursors", "buckets", "keys"})
        ledgers = [(ledger.ledger_id, ledger.generation) for ledger in image.ledgers]
        ledger_files = {f"{i}.{g}.{kind}" for i, g in ledgers for kind in KINDS}
        ledger_files |= {ledger.amendments_file for ledger in image.ledgers}
        self._note_others(layout.ledgers(topic_id), ledger_files)
        cursor_files = {each.cursor_file for each in image.subscriptions} | {image.producers_file}
        self._note_others(layout.cursors(topic_id), cursor_files)
        if image.producers_file:
            self._check_producers(image)
        self._note_others(layout.buckets(topic_id), {f"{i}.bucket" for i in image.bucket_ids})
        self._note_others(layout.keys(topic_id), {f"{i}.keys" for i in image.key_run_ids})
        return image

    def _check_ledger(self, capture: LedgerCapture) -> None:
        self._ledger_count += 1
        self._entry_count += capture.entry_count
        folder = self._layout.ledgers(capture.topic_id)
        for problem in verify_ledger(self._vfs, folder, capture, LINES_MAX):
            self._problems.add(f"{problem.what} ({problem.path} at offset {problem.offset})")
        if capture.sealed:
            return
        for kind, length in file_lengths(capture).items():
            path = f"{folder}/{capture.ledger_id}.{capture.generation}.{kind}"
            surplus = size_if_there(self._vfs, path) - (length if capture.entry_count else 0)
            if surplus > 0:
                self._notes.add(
                    f"{surplus} bytes follow what the manifest names; the next start cuts them ({path})"
                )

    def _check_producers(self, image: TopicImage) -> None:
        try:
            read_producers(self._vfs, self._layout, image)
        except Corrupt as error:
            self._problems.add(error.message)

    def _check_subscription(self, image: TopicImage, subscription: SubscriptionImage) -> CursorView:
        """What the subscription has settled; of a cursor that cannot be read, what lies before its mark."""
        self._subscription_count += 1
        where = f"(topic {image.topic_id}, subscription {subscription.subscription_id})"
        cursor = CursorImage(image.topic_id, subscription.subscription_id, {}, {}, {})
        if subscription.cursor_file:
            path = f"{self._layout.cursors(image.topic_id)}/{subscription.cursor_file}"
            where = f"({path})"
            try:
                found = decode_cursor(read_file(self._vfs, path), path)
            except Corrupt as error:
                self._problems.add(error.message)
                return CursorView(subscription.mark, {})
            if (found.topic_id, found.subscription_id) != (cursor.topic_id, cursor.subscription_id):
                self._problems.add(f"A cursor belongs to another subscription {where}")
                return CursorView(subscription.mark, {})
            cursor = found
        for what in find_cursor_problems(image, subscription, cursor):
            self._problems.add(f"{what} {where}")
        return CursorView(subscription.mark, cursor.settled)

    def _check_index(self, image: TopicImage, cursors: Sequence[CursorView]) -> None:
        """Compare the delayed index with the ledgers."""
        topic_id, layout = image.topic_id, self._layout
        for what in find_index_problems(image):
            self._problems.add(f"{what} ({layout.topic_manifest(topic_id)})")
        folder = layout.ledgers(topic_id)
        ledgers = [
            file_source(
                self._vfs, folder, ledger_capture(ledger, topic_id), self._read_amendments(image, ledger)
            )
            for ledger in image.ledgers
        ]
        gone = frozenset(ledger_id for ledger_id, _ in image.gone_ledgers)
        state = IndexState(image.indexed_through, image.index_lsn, image.frontier_ms, gone)
        storage = LocalBucketStorage(self._vfs, layout.buckets(topic_id), topic_id)
        findings, _ = check_index(storage.open_reader, image.bucket_ids, state, ledgers, cursors)
        for finding in findings:
            self._problems.add(f"{finding} ({layout.topic(topic_id)})")

    def _check_keys(self, image: TopicImage) -> None:
        """Compare the lookup of schedule keys with the ledgers."""
        amendments: dict[int, Amendments | None] = {}
        try:
            amendments.update(read_amendments(self._vfs, self._layout, image))
        except Corrupt:  # `_check_index` says so
            amendments = {ledger.ledger_id: None for ledger in image.ledgers}
        for what in find_key_problems(self._vfs, self._layout, image, amendments):
            self._problems.add(what)

    def _read_amendments(self, image: TopicImage, ledger: LedgerImage) -> Amendments | None:
        """What was amended of a ledger; None if that cannot be read."""
        if not ledger.amendments_file:
            return NONE
        path = f"{self._layout.ledgers(image.topic_id)}/{ledger.amendments_file}"
        try:
            found = decode_amendments(read_file(self._vfs, path), path)
        except Corrupt as error:
            self._problems.add(error.message)
            return None
        if (found.topic_id, found.ledger_id) != (image.topic_id, ledger.ledger_id):
            self._problems.add(f"Amendments belong to another ledger ({path})")
            return None
        for what in find_amendment_problems(image, ledger, found.amendments):
            self._problems.add(f"{what} ({path})")
        return found.amendments

    # -- the journal -----------------------------------------------------------------------------------------

    def _check_journal(self, root: BrokerImage, images: Sequence[TopicImage]) -> None:
        folder = self._layout.journal
        for name in self._names(folder):
            if not SEGMENT_NAME.fullmatch(name) and not SPARE_NAME.fullmatch(name):
                self._notes.add(f"No manifest names this ({folder}/{name})")
        history = History(root, images)
        for what in history.begin():
            self._problems.add(what)
        from_lsn = root.checkpoint_lsn + 1
        files = JournalFiles(self._vfs, folder, segment_bytes=0, spare_segments_max=0, clock=SystemClock())
        try:
            found = files.examine(
                from_lsn, max([root.checkpoint_lsn, *(image.applied_lsn for image in images)])
            )
            if found.cut_roll is not None:
                self._notes.add(f"A crash cut the making of this segment ({found.cut_roll})")
            # What else follows the last group is the rest of a recycled file: every clean stop leaves that.
            if found.torn_bytes:
                self._notes.add(
                    f"The journal's last group is not whole, {found.torn_bytes} bytes of it are there: a crash cut it "
                    f"before anybody was answered, or it was damaged since; the next start drops it ({folder})"
                )
            for lsn, record_type, body in () if found.is_new else files.replay(from_lsn):
                self._record_count += 1
                for what in _check_record(history, lsn, record_type, body):
                    self._problems.add(f"lsn {lsn}: {what} ({folder})")
        except Corrupt as error:
            self._problems.add(error.message)
            return
        for what in history.end():
            self._problems.add(what)

    # -- files -----------------------------------------------------------------------------------------------

    def _note_others(self, folder: str, named: set[str]) -> None:
        for name in self._names(folder):
            if name not in named:
                self._notes.add(f"No manifest names this ({folder}/{name})")

    def _names(self, folder: str) -> list[str]:
        return list_if_there(self._vfs, folder)


def _check_record(history: History, lsn: int, record_type: int, body: memoryview) -> Iterator[str]:
    try:
        record = decode_record(record_type, body)
    except Corrupt as error:
        yield error.message
        return
    if isinstance(record, Produced):
        yield from find_batch_problems(record)
    yield from history.apply(lsn, record)
