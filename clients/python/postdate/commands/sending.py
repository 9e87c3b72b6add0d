"""Sending for commands that have many messages and time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import postdate

_PAUSE = timedelta(seconds=1)
_RATES = {"PRODUCE_RATE_EXCEEDED", "LIMIT_RATE_EXCEEDED"}


async def send_patiently(
    producer: postdate.Producer, messages: Sequence[postdate.OutgoingMessage], *, replace: bool
) -> postdate.Receipts:
    """Send one batch; where a produce rate is spent, wait as long as the broker says."""
    while True:
        try:
            return await producer.send_many(messages, replace=replace)
        except postdate.LimitReached as error:
            if error.reason not in _RATES:
                raise
            await asyncio.sleep((error.retry_after or _PAUSE).total_seconds())
