"""Page tokens of the schedule: what they go on with, and from where. Pure.

    fingerprint . due time . ledger . entry [ . lsn ]

The fingerprint is of everything that makes two pages parts of one list or one change. A token is not secret and not
signed: whoever makes one up reads from another place of the same list, which a filter could have asked for as well.
"""

from __future__ import annotations

import hashlib
import re

from broker.delayed.due_rows import Key
from broker.errors import InvalidRequest
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, TIME_MS_MAX
from broker.rpc.paging import decode_token, encode_token
from broker.topics.schedule_values import Change, DueRange, PageMark

_TOKEN = re.compile(
    r"([0-9a-f]{16})\.([0-9]{1,16})\.([0-9]{1,15})\.([0-9]{1,10})(?:\.([0-9]{1,19}))?", re.ASCII
)
_LSN_MAX = (1 << 63) - 1


def fingerprint(
    topic: str, due: DueRange, key_prefix: str, change: Change | None = None, *, dry_run: bool = False
) -> str:
    """Return what the pages of one list, or of one change, have in common."""
    whole = repr((topic, tuple(due), key_prefix, change, dry_run))
    return hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()


def encode_place(print_: str, key: Key) -> str:
    """The token of a list's next page."""
    return encode_token(f"{print_}.{key[0]}.{key[1]}.{key[2]}")


def encode_mark(print_: str, mark: PageMark) -> str:
    """The token of a change's next page."""
    ms, ledger_id, entry_id = mark.key
    return encode_token(f"{print_}.{ms}.{ledger_id}.{entry_id}.{mark.lsn}")


def decode_place(page_token: str, print_: str) -> Key | None:
    """Return where a list goes on; None at its first page."""
    place = _decode(page_token, print_)
    if place is None:
        return None
    key, lsn = place
    if lsn is not None:
        raise _refused()
    return key


def decode_mark(page_token: str, print_: str) -> PageMark | None:
    """Return where a change goes on; None at its first page."""
    place = _decode(page_token, print_)
    if place is None:
        return None
    key, lsn = place
    if lsn is None:
        raise _refused()
    return PageMark(key, lsn)


def _decode(page_token: str, print_: str) -> tuple[Key, int | None] | None:
    if not page_token:
        return None
    match = _TOKEN.fullmatch(decode_token(page_token))
    if match is None or match[1] != print_:
        raise _refused()
    key = (int(match[2]), int(match[3]), int(match[4]))
    lsn = int(match[5]) if match[5] is not None else None
    # One beyond the greatest: a page may begin behind the last entry that there can be.
    if (
        key[0] > TIME_MS_MAX + 1
        or key[1] > LEDGER_ID_MAX
        or key[2] > ENTRY_ID_MAX + 1
        or (lsn or 0) > _LSN_MAX
    ):
        raise _refused()
    return key, lsn


def _refused() -> InvalidRequest:
    return InvalidRequest(
        "page_token is invalid, or belongs to another filter or change",
        field="page_token",
        reason="INVALID_PAGE_TOKEN",
    )
