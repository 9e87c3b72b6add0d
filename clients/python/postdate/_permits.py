"""Permits of one consumer: what the broker may send it, what was taken, and what its limit leaves.

Invariants:
  PERMITS-1  Permits granted on a connection are those taken and those outstanding: what the broker may still send and
      what waits to be taken are at most `most` together. What was lost counts as taken.
  PERMITS-2  With a limit, no more than that are taken, whatever breaks in between. What was lost does not count.
"""

from __future__ import annotations


class Permits:
    """See the module's description. `taken` and `left` are counted in place: a call for each message costs more."""

    def __init__(self, most: int | None, limit: int | None) -> None:
        if (most is not None and most < 1) or (limit is not None and limit < 1):
            raise ValueError("permits and limit are at least 1")
        self.most: int = most or 0
        """0: not known before it is known how messages are taken."""
        self.left = limit
        """Messages that may still be taken; None is any number."""
        self.taken: int = 0
        """Since permits were last given back."""
        self._ungranted: int | None = None  # of those left, what no permits of this connection cover yet
        self._unsent = 0
        self._held = 0  # until the acks of the connection before are settled

    def connect(self, *, held: bool) -> int:
        """Begin a connection; returns the permits that open it: none if they are held until `release`."""
        self.taken = self._unsent = 0
        granted = self._cover(self.most)
        self._held = granted if held else 0
        return 0 if held else granted

    def begin(self, most: int) -> bool:
        """Set how many there are, unless that is known; returns whether there are some to send.

        They are sent on a connection that has begun, answered or not: only the next `connect` counts anew.
        """
        if self.most:
            return False
        self.most = most
        self._unsent += self._cover(most)
        return True

    def release(self) -> bool:
        """Let those go that were held; returns whether there were any."""
        released, self._held = self._held, 0
        self._unsent += released
        return released > 0

    @property
    def are_held(self) -> bool:
        return self._held > 0

    def lose(self, count: int) -> None:
        """Messages were lost that wait to be taken."""
        self.taken += count
        if self._ungranted is not None:
            self._ungranted += count

    def give_back(self) -> bool:
        """Give permits for what was taken (PERMITS-1), within the limit (PERMITS-2); whether there are any."""
        taken, self.taken = self.taken, 0
        if self._ungranted is not None:
            taken = min(taken, self._ungranted)
            self._ungranted -= taken
        self._unsent += taken
        return taken > 0

    def take_unsent(self) -> int:
        """Return the permits to send now, once."""
        unsent, self._unsent = self._unsent, 0
        return unsent

    def _cover(self, most: int) -> int:
        """Return the permits of a connection that has none, and note what the limit leaves for later."""
        granted = most if self.left is None else min(most, self.left)
        self._ungranted = None if self.left is None else self.left - granted
        return granted
