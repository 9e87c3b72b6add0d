"""`postdate.testing` without async.

with postdate.sync.testing.broker() as fake, fake.client() as client:
    ...
    fake.advance(timedelta(days=3))
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime, timedelta

from postdate import testing as _testing
from postdate.sync._portal import Portal, portal
from postdate.sync.client import Client

__all__ = ["FakeBroker", "broker"]


class FakeBroker:
    """A running broker whose clock a test sets forward; made by `broker`."""

    def __init__(self, inner: _testing.FakeBroker, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    @property
    def address(self) -> str:
        """The address where it listens, for `postdate.sync.connect`."""
        return self._inner.address

    @property
    def now(self) -> datetime:
        """The time on its clock, which runs as usual and is ahead of the machine's by what it was advanced."""
        return self._inner.now

    def client(self) -> Client:
        """`postdate.sync.connect` to it, to be used as a context manager."""
        return Client(self._inner.client(), self._portal)

    def advance(self, by: timedelta) -> None:
        """Let `by` pass: return once all that became due meanwhile has come to the consumers that can take it.

        See `postdate.testing.FakeBroker.advance`.
        """
        self._portal.run(self._inner.advance(by))


@contextmanager
def broker() -> Generator[FakeBroker, None, None]:
    """A broker of its own for a test, with nothing in it."""
    inside = _testing.start_inside()
    try:
        yield FakeBroker(_testing.FakeBroker(inside), portal())
    finally:
        inside.stop()
