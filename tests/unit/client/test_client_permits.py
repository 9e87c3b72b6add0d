"""Permits of a consumer: never more under way than were asked for, never more taken than its limit, never stuck."""

from __future__ import annotations

from itertools import product

import pytest

from postdate._permits import Permits


class Stream:
    """A broker that sends as many messages as it is permitted, and a consumer; both as plain as can be."""

    def __init__(self, most: int, limit: int | None, *, is_known: bool) -> None:
        self.permits = Permits(most if is_known else None, limit)
        self.most, self.limit = most, limit
        self.outstanding = 0  # what the broker may still send
        self.waiting = 0  # what it has sent and nobody has taken
        self.taken = 0

    def connect(self, *, held: bool) -> None:
        self.waiting = 0
        self.outstanding = self.permits.connect(held=held)
        assert not (held and self.outstanding)

    def release(self) -> None:
        self.permits.release()

    def begin(self) -> None:
        self.permits.begin(self.most)

    def send(self) -> None:
        self.outstanding += self.permits.take_unsent()
        self.waiting += self.outstanding
        self.outstanding = 0

    def take(self) -> None:
        if not self.waiting or self.permits.left == 0:
            return
        self.waiting -= 1
        self.taken += 1
        self.permits.taken += 1
        if self.permits.left is not None:
            self.permits.left -= 1
        if self.permits.taken * 2 >= self.permits.most:
            self.permits.give_back()

    def lose(self) -> None:
        if self.waiting:
            self.waiting -= 1
            self.permits.lose(1)
            self.permits.give_back()

    def check(self) -> None:
        assert self.outstanding + self.waiting <= self.most  # PERMITS-1
        assert self.limit is None or self.taken + self.outstanding + self.waiting <= self.limit  # PERMITS-2


STEPS = ("connect", "connect held", "release", "begin", "send", "take", "lose")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("most", "limit", "is_known"), [(3, None, True), (3, 4, True), (2, 5, True), (3, None, False)]
)
def test_no_history_permits_too_much_or_forgets_any(most: int, limit: int | None, is_known: bool) -> None:
    """Every history of five steps."""
    for steps in product(STEPS, repeat=5):
        stream = Stream(most, limit, is_known=is_known)
        stream.connect(held=False)
        for step in steps:
            if step.startswith("connect"):
                stream.connect(held=step == "connect held")
            else:
                getattr(stream, step)()
            stream.check()
        stream.begin()
        stream.release()
        stream.send()
        room = most - stream.permits.taken
        assert stream.waiting == (room if limit is None else min(room, limit - stream.taken)), steps
        before = stream.taken
        for _ in range(6):
            stream.send()
            stream.take()
        stream.check()
        assert stream.taken == (before + 6 if limit is None else limit), steps


def test_what_is_held_counts_from_its_release_on() -> None:
    permits = Permits(10, 7)
    assert permits.connect(held=True) == 0 and permits.are_held
    assert permits.take_unsent() == 0
    assert permits.release() and not permits.are_held
    assert permits.take_unsent() == 7
    assert permits.take_unsent() == 0 and not permits.release()


@pytest.mark.parametrize(("most", "limit"), [(0, None), (None, 0), (-1, 5)])
def test_fewer_than_one_are_refused(most: int | None, limit: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Permits(most, limit)
