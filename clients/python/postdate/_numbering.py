"""Sequence ids of one producer: its caller's own, or rising by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

SEQUENCE_ID_MAX = 2**64 - 1


class Numbering:
    """Numbers the messages of a producer that has a name.

    Numbers of our own begin at the clock's nanoseconds. So they lie above all that an earlier producer of this
    name gave out, without asking anybody: no producer sends a message each nanosecond. Where the clock was set
    back meanwhile, the broker refuses what it may have seen (SEQUENCE_TOO_OLD); it is never taken for a repeat,
    because two producers do not begin in the same nanosecond.
    """

    __slots__ = ("_given", "_next")

    def __init__(self, now_ns: int) -> None:
        self._next = now_ns
        self._given: bool | None = None  # the first message decides

    def number(self, given: int | None) -> int:
        """The sequence id of the next message; `given` is its caller's."""
        if self._given is None:
            self._given = given is not None
        if self._given != (given is not None):
            raise ValueError(
                "either all messages of a producer have a sequence_id from their caller, or none"
            )
        if given is not None:
            if isinstance(given, bool) or not isinstance(given, int):
                raise TypeError(f"sequence_id must be an int, not {type(given).__name__}")
            if not 1 <= given <= SEQUENCE_ID_MAX:
                raise ValueError("sequence_id is between 1 and 2**64 - 1")
            return given
        self._next += 1
        return self._next

    def numbers(self, given: Sequence[int | None]) -> Sequence[int]:
        """The sequence ids of the next messages, of which there is one at least."""
        first = self.number(given[0])
        if self._given:
            return [first, *map(self.number, given[1:])]
        if given.count(None) < len(given):
            self.number(next(each for each in given if each is not None))  # which refuses it
        self._next += len(given) - 1
        return range(first, first + len(given))


def refuse_number() -> NoReturn:
    """Refuse a number where the producer has no name: it would do nothing."""
    raise ValueError("a sequence_id requires a producer_name")
