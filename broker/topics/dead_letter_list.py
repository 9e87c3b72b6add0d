"""The dead letters of a subscription in the order of their ids, from a place on: what lists of them are made of."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

from broker.errors import NotFound
from broker.model import Position, UInt32Column, ids_of
from broker.settings import MIB
from broker.storage.salvage import NO_FRAME, read_marking_damage
from broker.topics.dead_letters import HeldLetters
from broker.topics.schedule_values import DueRange
from broker.topics.topic import Topic

LOOKED_MAX = 10_000
"""Letters that a page of a search looks at."""

_SEARCH_STEP = 1_000


@dataclass(frozen=True, slots=True)
class LetterSearch:
    """Search for dead letters: by a text in their reasons, upper or lower case, and by when they were given up."""

    text: str
    given_up: DueRange

    def step(self, page_size: int) -> int:
        """Return how many letters to read at once: without a search all that are read are shown."""
        return page_size if not self.text and self.given_up == DueRange() else _SEARCH_STEP

    def matches(self, reason: str, last_reason: str, time_ms: int) -> bool:
        if not self.given_up.start_ms <= time_ms < self.given_up.end_ms:
            return False
        text = self.text.casefold()
        return text in reason.casefold() or text in last_reason.casefold()


async def letters_after(
    places: Sequence[HeldLetters], after: Position, step: int
) -> AsyncIterator[tuple[Topic, Position, bytes]]:
    """Each letter as it is stored, with the topic that holds it; `step` of them are read at once, by bytes fewer."""
    for topic, ledger_id, ids in _rest_of(places, after):
        at = 0
        while at < len(ids):
            try:
                some = ids[at : at + step]
                _, _, stored = await read_marking_damage(topic.log, ledger_id, some, MIB)
            except NotFound:  # all of them were dealt with meanwhile
                break
            for entry_id, frame in zip(ids[at:].tolist(), stored, strict=False):
                if frame is not NO_FRAME:  # of a damaged letter nothing can be shown
                    yield topic, Position(ledger_id, entry_id), frame
            at += len(stored)


def _rest_of(places: Sequence[HeldLetters], after: Position) -> Iterator[tuple[Topic, int, UInt32Column]]:
    """Return the places after a page, ledger by ledger, oldest first."""
    ledgers = [
        (ledger_id, place.topic, bitmap) for place in places for ledger_id, bitmap in place.entries.items()
    ]
    for ledger_id, topic, bitmap in sorted(ledgers, key=lambda ledger: ledger[0]):
        ids = ids_of(bitmap)
        if ledger_id >= after.ledger_id:
            yield topic, ledger_id, ids[ids > after.entry_id] if ledger_id == after.ledger_id else ids
