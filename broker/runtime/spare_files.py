"""Descriptors held back for files, so that they can be opened while connections use up all others."""

from __future__ import annotations

import contextlib
import errno
import logging
import os

_USED_UP = frozenset({errno.EMFILE, errno.ENFILE})

_log = logging.getLogger(__name__)


class SpareDescriptors:
    """Opens files; gives up one of `count` spares where the process or the machine has none left.

    Spares are taken again with the next file that opens without them. Thread-safe: what two threads share is a
    list, of which one step takes or adds an element.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._spares: list[int] = []
        self._refill()

    def __len__(self) -> int:
        return len(self._spares)

    def open(self, path: str, flags: int) -> int:
        """Open a file, made for its owner alone if it is made; raises OSError."""
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno not in _USED_UP:
                raise
            return self._open_with_spare(path, flags, error)
        self._refill()
        return fd

    def close(self) -> None:
        """Give up all spares, for good."""
        self._count = 0
        while self._give_up():
            pass

    def _open_with_spare(self, path: str, flags: int, error: OSError) -> int:
        if len(self._spares) == self._count > 0:
            fields = {"spares": self._count, "path": path, "error": error}
            _log.warning(
                "Out of file descriptors; files are opened with the reserved ones", extra={"fields": fields}
            )
        # A connection that comes in between can take what was given up: there are as many attempts as spares.
        while self._give_up():
            with contextlib.suppress(OSError):
                return os.open(path, flags, 0o600)
        raise error

    def _give_up(self) -> bool:
        try:
            os.close(self._spares.pop())
        except IndexError:
            return False
        return True

    def _refill(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._spares) < self._count:
                self._spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
