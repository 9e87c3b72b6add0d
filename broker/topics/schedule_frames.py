"""Schedule key of a stored frame, found by walking it: a page has a thousand frames. Pure."""

from __future__ import annotations

from broker.errors import Corrupt
from broker.storage.message_fields import (
    FIXED32,
    FIXED64,
    FRAME_TAG,
    LENGTH,
    SCHEDULE_KEY_TAG,
    VARINT,
    varint_at,
)


def schedule_key_of(frame: bytes) -> str:
    """The schedule_key of a message; empty if it has none. Raises Corrupt."""
    try:
        if frame[0] != FRAME_TAG:
            raise Corrupt("The tag of a stored frame is wrong")
        length, at = varint_at(frame, 1)
        if at + length != len(frame):
            raise Corrupt("The length of a stored frame is wrong")
        return _last_key(frame, at).decode()
    except IndexError:
        raise Corrupt("A field of a stored message is truncated") from None
    except UnicodeDecodeError as error:
        raise Corrupt("A stored schedule_key is not UTF-8") from error


def _last_key(frame: bytes, at: int) -> bytes:
    """Of the keys in the fields from a place on the last one, which counts; IndexError where a field does not end."""
    key = b""
    end = len(frame)
    while at < end:
        tag = frame[at]
        at += 1
        if tag >= 0x80:
            tag, at = varint_at(frame, at - 1)
        kind = tag & 7
        if kind == LENGTH:
            length = frame[at]
            at += 1
            if length >= 0x80:
                length, at = varint_at(frame, at - 1)
            if tag == SCHEDULE_KEY_TAG:
                key = frame[at : at + length]
            at += length
        elif kind == VARINT:
            _, at = varint_at(frame, at)
        elif kind in (FIXED32, FIXED64):
            at += 4 if kind == FIXED32 else 8
        else:
            raise Corrupt(f"A stored message has a field of the unknown wire type {kind}")
    if at != end:
        raise IndexError
    return key
