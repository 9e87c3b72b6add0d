"""Schedule fields of a stored frame, found by walking it: a page has a thousand frames. Pure.

A frame is `0x12 length message`; this layer knows of messages no more than the numbers of their fields.
"""

from __future__ import annotations

from broker.errors import Corrupt

_FRAME_TAG = 0x12
_SCHEDULE_KEY = 6 << 3 | 2
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_VARINT_BYTES_MAX = 10


def schedule_key_of(frame: bytes) -> str:
    """The schedule_key of a message; empty if it has none. Raises Corrupt."""
    try:
        if frame[0] != _FRAME_TAG:
            raise Corrupt("A stored frame does not begin as one")
        length, at = _varint(frame, 1)
        if at + length != len(frame):
            raise Corrupt("A stored frame is not as long as it says")
        return _last_key(frame, at).decode()
    except IndexError:
        raise Corrupt("A field of a stored message is cut short") from None
    except UnicodeDecodeError as error:
        raise Corrupt("A schedule_key that was stored is not UTF-8") from error


def _last_key(frame: bytes, at: int) -> bytes:
    """Of the keys in the fields from a place on the last one, which counts; IndexError where a field does not end."""
    key = b""
    end = len(frame)
    while at < end:
        tag = frame[at]
        at += 1
        if tag >= 0x80:
            tag, at = _varint(frame, at - 1)
        kind = tag & 7
        if kind == _LENGTH:
            length = frame[at]
            at += 1
            if length >= 0x80:
                length, at = _varint(frame, at - 1)
            if tag == _SCHEDULE_KEY:
                key = frame[at : at + length]
            at += length
        elif kind == _VARINT:
            _, at = _varint(frame, at)
        elif kind in (_FIXED32, _FIXED64):
            at += 4 if kind == _FIXED32 else 8
        else:
            raise Corrupt(f"A stored message has a field of the unknown kind {kind}")
    if at != end:
        raise IndexError
    return key


def _varint(frame: bytes, at: int) -> tuple[int, int]:
    """The number at a place, and the place after it; IndexError if it does not end."""
    value = shift = 0
    for place in range(at, at + _VARINT_BYTES_MAX):
        octet = frame[place]
        value |= (octet & 0x7F) << shift
        if octet < 0x80:
            return value, place + 1
        shift += 7
    raise Corrupt("A number in a stored message never ends")
