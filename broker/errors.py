"""Failures, grouped by what the caller should do about them.

Every failure that a caller can meet derives from one of the base classes below; the rpc edge maps the
base class to a status code and `reason` to `google.rpc.ErrorInfo.reason`. Anything else is a bug and
becomes INTERNAL.
"""

from __future__ import annotations

from collections.abc import Iterable


class PostdateError(Exception):
    """Base of all failures that have a meaning for the caller.

    `reason` is the UPPER_SNAKE word of the table in docs/errors.md; `facts` are bounded key-value pairs.
    """

    reason = "INTERNAL"

    def __init__(self, message: str, *, reason: str | None = None, **facts: str | int) -> None:
        super().__init__(message)
        self.message = message
        if reason is not None:
            self.reason = reason
        self.facts = facts

    @property
    def told(self) -> str:
        """The message as clients get it: the names of the broker's files are for its log."""
        if not self.names_files:
            return self.message
        why = self.__cause__.strerror if isinstance(self.__cause__, OSError) else ""
        return f"The broker could not use a file of its own{f': {why}' if why else ''}; its log says which"

    @property
    def names_files(self) -> bool:
        """Return whether message and facts say which file of the broker it is about."""
        return "path" in self.facts


class InvalidRequest(PostdateError):
    """Fix the request: it can never succeed as it is. `field` names the field as the proto does."""

    reason = "INVALID_REQUEST"

    def __init__(
        self, message: str, *, field: str = "", reason: str | None = None, **facts: str | int
    ) -> None:
        super().__init__(message, reason=reason, **facts)
        self.field = field


class OutOfRange(InvalidRequest):
    """A value beyond a limit that the operator has set; the limit is in the message and in the facts."""

    reason = "OUT_OF_RANGE"


class NotFound(PostdateError):
    """There is no such thing."""

    reason = "NOT_FOUND"


class AlreadyExists(PostdateError):
    """There is such a thing already. `field`, if there is one, names what asked for it as the proto does."""

    reason = "ALREADY_EXISTS"

    def __init__(
        self, message: str, *, field: str = "", reason: str | None = None, **facts: str | int
    ) -> None:
        super().__init__(message, reason=reason, **facts)
        self.field = field


class Refused(PostdateError):
    """The request is well formed, but the state of the topic or subscription does not allow it."""

    reason = "FAILED_PRECONDITION"


class Unauthenticated(PostdateError):
    """Nobody knows who asks: what they showed is missing, wrong or has expired."""

    reason = "CREDENTIALS_INVALID"


class PermissionDenied(PostdateError):
    """It is known who asks, and that they may not do that, whether or not there is such a thing."""

    reason = "PERMISSION_DENIED"


class LimitReached(PostdateError):
    """Slow down and try again after `retry_after_ms`."""

    reason = "LIMIT_REACHED"

    def __init__(
        self, message: str, *, retry_after_ms: int = 1000, reason: str | None = None, **facts: str | int
    ) -> None:
        super().__init__(message, reason=reason, **facts)
        self.retry_after_ms = retry_after_ms


class Unavailable(PostdateError):
    """Try again later: the broker is starting, draining or has stopped accepting writes."""

    reason = "UNAVAILABLE"

    def __init__(
        self, message: str, *, retry_after_ms: int = 1000, reason: str | None = None, **facts: str | int
    ) -> None:
        super().__init__(message, reason=reason, **facts)
        self.retry_after_ms = retry_after_ms


class Fenced(PostdateError):
    """Stop: somebody newer owns this (a data directory, a port, a compaction)."""

    reason = "FENCED"


class StorageFailed(Unavailable):
    """A write or a sync failed. It is never retried; the broker has stopped accepting writes for good."""

    reason = "STORAGE_FAILED"

    @property
    def told(self) -> str:
        if self._is_fenced:
            return (
                "Another node owns the shard now, or another process the journal; this broker writes no more"
            )
        return "The broker has stopped accepting writes after a failed write or sync; it must be restarted"

    @property
    def names_files(self) -> bool:
        return not self._is_fenced

    @property
    def _is_fenced(self) -> bool:
        return isinstance(self.__cause__, Fenced)


class Corrupt(PostdateError):
    """Bytes on disk are not what was written. An operator decides; nothing is skipped in silence."""

    reason = "CORRUPT"

    def __init__(self, message: str, *, path: str = "", offset: int = -1, advice: str = "") -> None:
        where = f" ({path} at offset {offset})" if path and offset >= 0 else f" ({path})" if path else ""
        super().__init__(f"{message}{where}{'. ' + advice if advice else ''}", path=path, offset=offset)
        self.path = path
        self.offset = offset
        self.advice = advice

    @property
    def told(self) -> str:
        return "Stored messages are damaged; the broker's log says where, and what to do"


class MissingFile(Corrupt):
    """A file that a manifest names is not there."""


class DamagedMessage(Corrupt):
    """One stored message is not what was written; what is known of it, and those around it, are whole."""


class WrongSize(Corrupt):
    """A file has another length than what names it says."""


def forget_frames(error: BaseException) -> None:
    """Let go of the functions that a failure, and those that it was made from, came through.

    They hold the request, and often the failure too: whoever keeps it, or a cycle, would keep all of that.
    """
    linked: dict[int, BaseException] = {}
    _find_all((error,), linked)
    for linked_error in linked.values():
        linked_error.__traceback__ = None


def _find_all(errors: Iterable[BaseException | None], linked: dict[int, BaseException]) -> None:
    for error in errors:
        if error is not None and id(error) not in linked:
            linked[id(error)] = error
            inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
            _find_all((error.__cause__, error.__context__, *inner), linked)
