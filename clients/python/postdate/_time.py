"""Times as Python has them, and as the wire has them: milliseconds since the Unix epoch.

All conversions to the wire round up, because a message may come a fraction of a millisecond late
and never early.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_LAST = datetime.max.replace(tzinfo=UTC)
DURATION_MS_MAX = 2**53 - 1


def epoch_ms(moment: datetime, field: str) -> int:
    """The wire's form of an aware datetime."""
    try:
        return -((_EPOCH - moment) // _MS)
    except TypeError:
        if isinstance(moment, datetime):
            raise ValueError(
                f"{field} has no time zone, so nobody can say when it is; "
                "use an aware datetime, for example datetime.now(timezone.utc)"
            ) from None
        raise TypeError(f"{field} must be a datetime, not {type(moment).__name__}") from None


def duration_ms(span: timedelta, field: str) -> int:
    """The wire's form of a duration that is not negative."""
    if not isinstance(span, timedelta):
        raise TypeError(f"{field} must be a timedelta, not {type(span).__name__}")
    if span.days < 0:
        raise ValueError(f"{field} is negative")
    whole, rest = divmod(span, _MS)
    ms = whole + bool(rest)
    if ms > DURATION_MS_MAX:
        raise ValueError(f"{field} is too long: the broker knows times up to 2**53 - 1 milliseconds")
    return ms


def shift_ms(shift: timedelta, field: str) -> int:
    """The wire's form of a duration in either direction; later rather than earlier by a fraction."""
    if not isinstance(shift, timedelta):
        raise TypeError(f"{field} must be a timedelta, not {type(shift).__name__}")
    whole, rest = divmod(shift, _MS)
    ms = whole + bool(rest)
    if abs(ms) > DURATION_MS_MAX:
        raise ValueError(f"{field} is too long: the broker knows times up to 2**53 - 1 milliseconds")
    return ms


def moment(ms: int) -> datetime:
    """An aware datetime in UTC."""
    try:
        return _EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        # The wire reaches further than datetime does. A message from another client must not
        # break the consumer that only looks at its time.
        return _LAST


def moment_or_none(ms: int) -> datetime | None:
    """As `moment`, where 0 means that there is none."""
    return moment(ms) if ms else None


def span(ms: int) -> timedelta:
    """A duration from the wire."""
    try:
        return timedelta(milliseconds=ms)
    except OverflowError:  # as in `moment`; the broker stores none that is so long
        return timedelta.max
