"""Pages of lists. A token is the name, or place, that the page before ended with: lists may change in between."""

from __future__ import annotations

import base64
import binascii
import re
from typing import TypeVar

from broker.errors import InvalidRequest
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from broker.storage.backup_marker import Backup
from broker.subscriptions.subscription import Subscription
from broker.topics.topic import Topic

_PAGE_SIZE = 100
_PAGE_SIZE_MAX = 1_000
_POSITION = re.compile(r"([0-9]{1,15})\.([0-9]{1,10})", re.ASCII)

Named = TypeVar("Named", Topic, Subscription, Backup)


def check_page_size(page_size: int) -> int:
    """Return how many a page holds."""
    if not 0 <= page_size <= _PAGE_SIZE_MAX:
        raise InvalidRequest(
            f"page_size is between 0 and {_PAGE_SIZE_MAX}",
            field="page_size",
            reason="INVALID_PAGE_SIZE",
            limit=_PAGE_SIZE_MAX,
        )
    return page_size or _PAGE_SIZE


def encode_token(after: str) -> str:
    return base64.urlsafe_b64encode(after.encode()).decode()


def decode_token(page_token: str) -> str:
    """Return what `encode_token` was given; empty for the first page."""
    try:
        return base64.b64decode(page_token.encode("ascii"), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, UnicodeError) as error:
        raise InvalidRequest(
            "page_token is invalid", field="page_token", reason="INVALID_PAGE_TOKEN"
        ) from error


def encode_place(position: Position) -> str:
    return encode_token(f"{position.ledger_id}.{position.entry_id}")


def decode_place(page_token: str) -> Position:
    """Return the place that a page of messages ended with."""
    match = _POSITION.fullmatch(decode_token(page_token) or "0.0")
    if match is None or int(match[1]) > LEDGER_ID_MAX or int(match[2]) > ENTRY_ID_MAX:
        raise InvalidRequest("page_token is invalid", field="page_token", reason="INVALID_PAGE_TOKEN")
    return Position(int(match[1]), int(match[2]))


def page_by_name(items: list[Named], page_size: int, page_token: str) -> tuple[list[Named], str]:
    """One page and the token of the next."""
    count, after = check_page_size(page_size), decode_token(page_token)
    rest = sorted((item for item in items if item.name > after), key=lambda item: item.name)
    page = rest[:count]
    return page, encode_token(page[-1].name) if len(rest) > len(page) else ""
