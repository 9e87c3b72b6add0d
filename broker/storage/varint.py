"""Numbers as protobuf writes them: seven bits an octet, the lowest first."""

from __future__ import annotations


def encode_varint(value: int) -> bytes:
    octets = bytearray()
    while value > 0x7F:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    octets.append(value)
    return bytes(octets)
