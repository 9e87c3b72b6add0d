"""`postdate.backups` without async. Made by tools/generate_sync.py."""

from __future__ import annotations

from collections.abc import Iterator

from postdate import backups as _backups
from postdate.backups import Backup
from postdate.sync._portal import Portal


class Backups:
    """`client.backups`. Changes of which the answer is lost raise `Disconnected`; `list` tells what came of them."""

    def __init__(self, inner: _backups.Backups, portal: Portal) -> None:
        self._inner = inner
        self._portal = portal

    def create(self, label: str = "") -> Backup:
        """Make a backup; returns when it is complete and durable. Delivery goes on meanwhile.

        `FailedPrecondition` while another one is made or deleted. Who stops waiting does not stop the backup.
        """
        return self._portal.run(self._inner.create(label))

    def list(self, *, limit: int | None = None) -> Iterator[Backup]:
        """All complete backups, the oldest first, page by page as the iteration goes on; at most `limit`."""
        return self._portal.iterate(self._inner.list(limit=limit))

    def delete(self, name: str) -> None:
        """Delete a backup; `NotFound` if there is none of that name."""
        self._portal.run(self._inner.delete(name))
