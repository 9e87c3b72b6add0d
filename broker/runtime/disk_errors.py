"""Translation of OSError to Unavailable or StorageFailed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from broker.errors import Unavailable


@contextlib.contextmanager
def disk_errors(what: str, done: str, path: str) -> Iterator[None]:
    """Turn what the disk says into `Unavailable`; a file that is missing, or there already, is the caller's."""
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except OSError as error:
        raise Unavailable(f"{what} could not be {done} ({path}): {error}", path=path) from error
