"""The audit trail: a line in the log for each change that somebody asked for, with who, what and what came of it.

Changes of one kind, by one principal, of one topic are written one by one up to a number in ten seconds; what more
there are is counted, and told in one line at the end of that time. So a flood of changes costs the log little, and
hides nobody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from broker.observe.logs import get_logger
from broker.runtime.clock import Clock

log = get_logger(__name__)

LINES_MAX = 100
WINDOW_MS = 10_000
_KEYS_MAX = 1_000
_NAME_CHARACTERS_MAX = 255
_REST = ("*", "*", "*")
"""Whoever comes when so many have been counted apart in one window."""

_Key = tuple[str, str, str]
"""Principal, action, topic."""


@dataclass(slots=True)
class _HeldChanges:
    """Sum of one kind of change within a window."""

    written: int = 0
    changes: int = 0  # beyond those that were written
    results: dict[str, int] = field(default_factory=dict)


class AuditTrail:
    """See the module's description."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[_Key, _HeldChanges] = {}
        self._ends_ms = 0
        self._timer: asyncio.TimerHandle | None = None

    def note(
        self,
        action: str,
        result: str,
        *,
        principal: str,
        peer: str,
        topic: str = "",
        details: Mapping[str, object] | None = None,
    ) -> None:
        """Somebody asked for a change. `result` is `done`, or the reason why not; counts are among the details."""
        now_ms = self._clock.monotonic_ns() // 1_000_000
        if now_ms >= self._ends_ms:
            self.flush()
            self._ends_ms = now_ms + WINDOW_MS
        key = (principal[:_NAME_CHARACTERS_MAX], action, topic[:_NAME_CHARACTERS_MAX])
        if key not in self._held and len(self._held) >= _KEYS_MAX:
            key = _REST
        held = self._held.setdefault(key, _HeldChanges())
        if held.written < LINES_MAX:
            held.written += 1
            log.info(
                "Audit: a change",
                action=action,
                result=result,
                principal=principal,
                peer=peer,
                topic=topic,
                **(details or {}),
            )
            return
        held.changes += 1
        held.results[result] = held.results.get(result, 0) + 1
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WINDOW_MS / 1000, self.flush)

    def flush(self) -> None:
        """Write what was counted and not written."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held_of, self._held = self._held, {}
        for (principal, action, topic), held in held_of.items():
            if held.changes:
                log.info(
                    "Audit: further changes, summarized",
                    action=action,
                    principal=principal,
                    topic=topic,
                    changes=held.changes,
                    **{f"result_{result.lower()}": count for result, count in held.results.items()},
                )
