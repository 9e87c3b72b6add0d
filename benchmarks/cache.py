"""Makes files cold: takes them out of the page cache."""

from __future__ import annotations

import os
from pathlib import Path


def drop(folder: Path) -> None:
    """Write back everything below a folder and have the kernel forget it; other files stay where they are.

    A page that a process has mapped stays, so whatever should be cold must be closed or read with `pread`.
    """
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        try:
            file = os.open(path, os.O_RDONLY)
        except FileNotFoundError:  # removed meanwhile
            continue
        try:
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
