"""Capture of a subscription for a checkpoint: one step on the loop; the bytes are made in the file thread. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from broker.storage.manifest import CursorImage, encode_cursor
from broker.subscriptions.timed import TimesCapture


@dataclass(frozen=True, slots=True)
class CursorCapture:
    """One subscription at one moment."""

    others: CursorImage  # but for what waits, which is much and in no order yet
    waiting: TimesCapture

    def image(self) -> CursorImage:
        """The content of the cursor's file. Takes a while if much waits; for any thread."""
        return replace(self.others, waiting=self.waiting.by_ledger())

    def encode(self) -> bytes:
        """The cursor's file."""
        return encode_cursor(self.image())
