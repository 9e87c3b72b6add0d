"""A broker whose wall clock can be set while it runs: `python -m tests.process.stepped_broker`, as `postdate-broker`.

CLOCK_OFFSET_FILE names a file of eight bytes: the milliseconds by which its clock is ahead of the machine's. Its other
clocks are the machine's own.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from broker.__main__ import main
from broker.runtime.clock import SystemClock

OFFSET = struct.Struct("<q")
_now_ms = SystemClock.now_ms


def set_clock(path: Path, ahead_ms: int) -> None:
    """Set the clock of the brokers that read a file. Of its eight bytes each write is seen whole."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(OFFSET.pack(ahead_ms))


if __name__ == "__main__":
    with open(os.environ["CLOCK_OFFSET_FILE"], "rb") as offset_file:
        offset = mmap.mmap(offset_file.fileno(), OFFSET.size, access=mmap.ACCESS_READ)

    def _stepped_now_ms(clock: SystemClock) -> int:
        return _now_ms(clock) + int(OFFSET.unpack_from(offset)[0])

    setattr(SystemClock, "now_ms", _stepped_now_ms)  # noqa: B010 - a method in the place of another one
    main()
