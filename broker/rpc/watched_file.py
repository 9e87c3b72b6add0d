"""Things made of files, and made anew when they change: certificates, keys, tokens, rights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from broker.observe.logs import get_logger
from broker.observe.metrics import BrokerCounters
from broker.settings import ConfigError

log = get_logger(__name__)

T = TypeVar("T")

_Stamp = tuple[int, int, int] | None


class Watched(Generic[T]):
    """A value made of some files. What a broken change would make is not taken: the old one stays,
    and it is tried again.

    Files may change one after the other, a certificate before its key: what does not fit together is tried again
    once the next one has changed.
    """

    def __init__(
        self, what: str, paths: Sequence[str], make: Callable[[], T], counters: BrokerCounters
    ) -> None:
        """Raises ConfigError where the first value cannot be made."""
        self.what = what
        self._paths = [path for path in paths if path]
        self._make = make
        self._counters = counters
        self._stamps = [_stamp(path) for path in self._paths]
        """Of the files that the value was made of."""
        self._told: list[_Stamp] | None = None
        """Of those that could not be used, once that was told."""
        self.value = make()

    def refresh(self) -> bool:
        """Look, and make the value anew if a file has changed. Whether there is another value now."""
        stamps = [_stamp(path) for path in self._paths]
        if stamps == self._stamps:
            self._told = None
            return False
        try:
            self.value = self._make()
        except Exception as error:  # whatever is wrong with a file must not stop a broker that serves
            # It is tried again at each look: a read may have failed in passing, and the files would not change again.
            if stamps != self._told:
                self._told = stamps
                self._counters.note_security_reload(self.what, "failed")
                log.error(
                    "Changed security files cannot be used; the previous ones stay in force",
                    what=self.what,
                    error=error,
                )
            return False
        self._stamps, self._told = stamps, None
        self._counters.note_security_reload(self.what, "ok")
        log.info("Changed security files are now in force", what=self.what)
        return True


def read_text(setting: str, path: str) -> str:
    """The text of the file that a setting names; ConfigError."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{setting}: {path} is not text in UTF-8") from error


def _stamp(path: str) -> _Stamp:
    # Kubernetes swaps a symbolic link, which shows as another inode.
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
