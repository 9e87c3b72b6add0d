"""Errors, grouped by what the caller should do about them.

Every failure that a broker or the connection to it can cause derives from `PostdateError`.
Arguments that make no sense before anything is sent (a naive datetime, two delivery times) are
plain `ValueError` and `TypeError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from postdate.scheduled import BulkChange, ScheduleChange

_NOTHING: Mapping[str, str] = MappingProxyType({})


class PostdateError(Exception):
    """Base of all failures that the broker, or the way to it, can cause.

    `code` is the canonical status name (`NOT_FOUND`), `reason` the word of the broker's table of
    errors (`TOPIC_NOT_FOUND`), `field` the offending field as the API names it
    (`messages[17].payload`), `metadata` further facts and `retry_after` what the broker advises.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        reason: str = "",
        field: str = "",
        metadata: Mapping[str, str] = _NOTHING,
        retry_after: timedelta | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.field = field
        self.metadata = metadata
        self.retry_after = retry_after


class InvalidRequest(PostdateError):
    """Fix the request: it can never succeed as it is."""


class OutOfRange(InvalidRequest):
    """A value is beyond a limit that the operator has set; the message and `metadata` name it."""


class NotFound(PostdateError):
    """There is no such topic, subscription or message."""


class AlreadyExists(PostdateError):
    """There is one of that name already."""


class FailedPrecondition(PostdateError):
    """The state of the topic or subscription does not allow it."""


class LeaseLost(FailedPrecondition):
    """The lease ran out, or the connection broke: somebody else may hold the message by now."""


class LimitReached(PostdateError):
    """A quota, a rate or the disk is exhausted: slow down, try again after `retry_after`."""


class Unauthenticated(PostdateError):
    """The broker does not know who asks: the token or certificate is missing, wrong or expired.

    `reason` is CREDENTIALS_MISSING, CREDENTIALS_INVALID or CREDENTIALS_EXPIRED.
    """


class PermissionDenied(PostdateError):
    """The broker knows who asks, and that they may not do that here, whether or not it exists."""


class Unsupported(PostdateError):
    """This broker does not know how to do that."""


class Unavailable(PostdateError):
    """The broker cannot be reached, or cannot serve now. Nothing was stored; try again later."""


class TlsFailed(PostdateError):
    """The broker did not prove who it is: its certificate is not trusted, expired or another's, or it has none.

    Raised at once, as trying again changes nothing; a subscription that was open before goes on trying.
    """


class Disconnected(PostdateError):
    """The connection broke before the answer came: what was asked for may or may not have happened.

    Of a change to the schedule too if the broker failed in the middle of it; then `reason` says how.
    """


class DeadlineExceeded(PostdateError):
    """No answer came in time: what was asked for may or may not have happened."""


class Internal(PostdateError):
    """A fault of the broker, or an answer that makes no sense."""


class PartlyStored(PostdateError):
    """Some batches of one `send_many` were stored and others failed; or some occurrences of one `backfill`.

    `stored_count` messages were stored; the first error is the cause (`__cause__`).
    """

    def __init__(self, message: str, *, stored_count: int) -> None:
        super().__init__(message)
        self.stored_count = stored_count


class PartlyChanged(PostdateError):
    """Some calls of one bulk change were answered before one failed, for which see `__cause__`.

    `change` says what became of the messages of the former. What it does not tell of may have changed or not.
    """

    def __init__(self, message: str, *, change: ScheduleChange) -> None:
        super().__init__(message)
        self.change = change


class BulkChangeFailed(PostdateError):
    """A bulk change could not go on: `reason` and the message say why, `change` how far it came."""

    def __init__(self, message: str, *, reason: str, change: BulkChange) -> None:
        super().__init__(message, reason=reason)
        self.change = change


class Closed(PostdateError):
    """The client, producer or subscription was closed before."""
