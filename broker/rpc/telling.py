"""Answers and refusals that may be told, by who owns the broker's state at that moment.

The completion of a record is told whoever owns the state by now: it was stored (CLUSTER-7). Everything else that an
answer may say (a count, what is pending, "not found", "already delivered", the first answer to a repeat) is told only
while the broker owns what it tells of (CLUSTER-10). Whoever serves a call looks at that last. The work of a call says
here that there is no need, if its answer consists of completed records of its own; a repeat is answered with what was
not its own work, so what the first call said here does not count for it.
"""

from __future__ import annotations

from contextvars import ContextVar

from broker.errors import PermissionDenied, PostdateError, Unauthenticated, Unavailable
from broker.runtime.ownership import Ownership, ownership_lost

_NOT_OF_THE_STATE = (Unavailable, Unauthenticated, PermissionDenied)
"""Refusals that say nothing of topics and messages. All others may hang on them."""


class Telling:
    """The answer of the call that is being served."""

    __slots__ = ("is_free",)

    def __init__(self) -> None:
        self.is_free = False
        """It needs no ownership."""


_TELLING: ContextVar[Telling | None] = ContextVar("answer of a call", default=None)


def begin_telling() -> Telling:
    """Return the answer of the call that is served from here on, by this task and those that it starts."""
    telling = Telling()
    _TELLING.set(telling)
    return telling


def tell_freely() -> None:
    """Say that the answer consists of completed records of this call, or says nothing of topics and messages."""
    if (telling := _TELLING.get()) is not None:
        telling.is_free = True


def tellable(ownership: Ownership, error: Exception) -> Exception:
    """Return a refusal, or what is said in its place: then it may hang on a state that is another one's by now."""
    if isinstance(error, PostdateError) and not isinstance(error, _NOT_OF_THE_STATE):
        return ownership_lost(ownership) or error
    return error
