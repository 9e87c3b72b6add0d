"""A sealed ledger in files beside a model of it, and generations of it: what the tests of sparse ledgers share."""

from __future__ import annotations

from collections.abc import Iterable

from pyroaring import BitMap

from broker.model import CANCELLED_MS
from broker.storage.amendments import NONE, Amendments
from broker.storage.blocks import LedgerCapture
from broker.storage.ledger import Ledger
from broker.storage.ledger_check import verify_ledger
from broker.storage.ledger_files import OpenFiles
from broker.storage.sparse_writer import open_source, write_generation
from tests.unit.storage.held_executor import HeldExecutor
from tests.unit.storage.ledger_book import FOLDER, Book, persisted


def rewrite(
    book: Book, capture: LedgerCapture, live: Iterable[int], amendments: Amendments = NONE
) -> LedgerCapture:
    """The next generation of a ledger, beside the one before."""
    target = capture.name(FOLDER)._replace(generation=capture.generation + 1, sparse=True, packed=False)
    with open_source(book.vfs, FOLDER, capture, amendments) as source:
        written = write_generation(book.vfs, source, BitMap(live), target)
    assert verify_ledger(book.vfs, FOLDER, written) == []
    return written


def opened(book: Book, generation: LedgerCapture) -> Ledger:
    executor = HeldExecutor()
    return Ledger.restore(generation, FOLDER, OpenFiles(book.vfs), executor, executor)


def expected_times(book: Book, live: Iterable[int]) -> list[int]:
    kept = set(live)
    return [time if i in kept else CANCELLED_MS for i, time in enumerate(book.times)]


async def sealed_book(count: int) -> tuple[Book, LedgerCapture]:
    return await persisted(count, sealed=True)
