"""Rest after the loss of a shard: a node that was fenced lets others take over first for a while.

Without it a store that is slow for all would make nodes lose the shard to each other in turns.

It lies in a file beside the shard's folder, as the process that lost ends.
"""

from __future__ import annotations

import json

from broker.runtime.clock import Clock
from broker.runtime.vfs import Vfs, read_file, replace_file

FIRST_MS = 30_000
LONGEST_MS = 600_000


class Rest:
    """The rest of one node for one shard. Blocks."""

    def __init__(self, vfs: Vfs, path: str, clock: Clock) -> None:
        self._vfs = vfs
        self._path = path
        self._clock = clock

    def left_ms(self) -> int:
        """Return how long this node still rests."""
        rest_ms, lost_ms = self._read()
        return min(max(lost_ms + rest_ms - self._clock.now_ms(), 0), rest_ms)

    def begin(self) -> None:
        """Note that the shard was lost: twice as long a rest as after the loss before, unless that was long ago."""
        now_ms = self._clock.now_ms()
        rest_ms, lost_ms = self._read()
        is_recent = abs(now_ms - lost_ms) < LONGEST_MS
        rest_ms = min(2 * rest_ms, LONGEST_MS) if rest_ms and is_recent else FIRST_MS
        replace_file(self._vfs, self._path, [json.dumps({"rest_ms": rest_ms, "lost_ms": now_ms}).encode()])

    def _read(self) -> tuple[int, int]:
        try:
            facts = json.loads(read_file(self._vfs, self._path))
            return min(int(facts["rest_ms"]), LONGEST_MS), int(facts["lost_ms"])
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # none yet; or damaged, and then it only shortens a rest
            return 0, 0
