"""Ownership that a test gives and takes."""

from __future__ import annotations

import sys
from collections.abc import Callable

from broker.errors import Unavailable


class HeldOwner:
    """See `broker.runtime.ownership.Ownership`. `looks` counts how often it was asked."""

    def __init__(self) -> None:
        self.is_held = True
        self.until_ms = sys.maxsize
        self.looks = 0
        self._watchers: list[Callable[[], None]] = []

    def holds(self) -> bool:
        self.looks += 1
        return self.is_held

    def check(self) -> None:
        if not self.holds():
            raise Unavailable("The owner lease has ended", reason="ENGINE_UNREACHABLE")

    def watch(self, regained: Callable[[], None]) -> None:
        self._watchers.append(regained)

    def regain(self) -> None:
        self.is_held = True
        for regained in self._watchers:
            regained()
