"""Page tokens of lists of the schedule: which list they go on with, and from where. Pure.

    fingerprint . due time . ledger . entry

The fingerprint is of everything that makes two pages parts of one list. A token is not secret and not signed: whoever
makes one up reads from another place of the same list, which a filter could have asked for as well.
"""

from __future__ import annotations

import hashlib
import re

from broker.delayed.due_rows import Key
from broker.errors import InvalidRequest
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, TIME_MS_MAX
from broker.rpc.paging import decode_token, encode_token
from broker.topics.schedule_values import DueRange

_TOKEN = re.compile(r"([0-9a-f]{16})\.([0-9]{1,16})\.([0-9]{1,15})\.([0-9]{1,10})", re.ASCII)


def fingerprint(topic: str, due: DueRange, key_prefix: str) -> str:
    """Return what the pages of one list have in common."""
    whole = repr((topic, tuple(due), key_prefix))
    return hashlib.blake2b(whole.encode(), digest_size=8).hexdigest()


def encode_place(print_: str, key: Key) -> str:
    """The token of a list's next page."""
    return encode_token(f"{print_}.{key[0]}.{key[1]}.{key[2]}")


def decode_place(page_token: str, print_: str) -> Key | None:
    """Return where a list goes on; None at its first page."""
    if not page_token:
        return None
    match = _TOKEN.fullmatch(decode_token(page_token))
    if match is None or match[1] != print_:
        raise _refused()
    key = (int(match[2]), int(match[3]), int(match[4]))
    # One beyond the greatest: a page may begin behind the last entry that there can be.
    if key[0] > TIME_MS_MAX + 1 or key[1] > LEDGER_ID_MAX or key[2] > ENTRY_ID_MAX + 1:
        raise _refused()
    return key


def _refused() -> InvalidRequest:
    return InvalidRequest(
        "page_token is invalid, or belongs to another filter",
        field="page_token",
        reason="INVALID_PAGE_TOKEN",
    )
