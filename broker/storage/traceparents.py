"""The traceparents of stored messages, found without decoding all of them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from broker.storage.message_fields import TRACEPARENT_TAG, body_at, walk_fields

_BYTES = 55
_HEAD = re.escape(bytes((TRACEPARENT_TAG, _BYTES)))
_ANY = re.compile(_HEAD + rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_SAMPLED = re.compile(_HEAD + rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f][13579bdf]")


def find_traceparents(frames: Iterable[bytes], *, sampled: bool, looks_max: int) -> Iterator[tuple[int, str]]:
    """The place and the traceparent of each frame that has one, of the form that the W3C's version 00 has.

    With `sampled` only those whose flags say that they are. Few frames are walked, `looks_max` at most: those that
    hold what looks like one, which may be a part of a payload.
    """
    pattern = _SAMPLED if sampled else _ANY
    for place, frame in enumerate(frames):
        if not looks_max:
            return
        if pattern.search(frame) is None:
            continue
        looks_max -= 1
        found = _traceparent(frame)
        if pattern.fullmatch(bytes((TRACEPARENT_TAG, _BYTES)) + found):
            yield place, found.decode()


def _traceparent(frame: bytes) -> bytes:
    message = memoryview(frame)[body_at(frame) :]
    last = b""
    for tag, _, content, end in walk_fields(message):
        if tag == TRACEPARENT_TAG:
            last = bytes(message[content:end])
    return last
