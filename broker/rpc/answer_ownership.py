"""Answers that a broker may give only while it owns the state that they tell of, and refusals likewise.

The completion of a record is told whoever owns the state by now: it was stored (CLUSTER-7). Everything else that an
answer may say (a count, what is pending, "not found", "already delivered", the first answer to a repeat) is told only
while the broker owns what it tells of (CLUSTER-10). `calls.answering` checks that last, after the work of the call.
A call whose answer consists of completed records of its own says so by `answer_without_ownership`. A repeat is answered
with what was not its own work, so what the first call said here does not count for it.
"""

from __future__ import annotations

from contextvars import ContextVar

from broker.errors import PermissionDenied, PostdateError, Unauthenticated, Unavailable
from broker.runtime.ownership import Ownership, ownership_lost

_NOT_OF_THE_STATE = (Unavailable, Unauthenticated, PermissionDenied)
"""Refusals that say nothing of topics and messages. All others may depend on them."""


class CallAnswer:
    """The answer of the call that is being served."""

    __slots__ = ("needs_ownership",)

    def __init__(self) -> None:
        self.needs_ownership = True
        """It is given only while the broker owns the state."""


_ANSWER: ContextVar[CallAnswer | None] = ContextVar("answer of a call", default=None)


def begin_answer() -> CallAnswer:
    """Return the answer of the call that is served from here on, by this task and those that it starts."""
    answer = CallAnswer()
    _ANSWER.set(answer)
    return answer


def answer_without_ownership() -> None:
    """Say that the answer consists of completed records of this call, or says nothing of topics and messages."""
    if (answer := _ANSWER.get()) is not None:
        answer.needs_ownership = False


def refusal_as_owner(ownership: Ownership, error: Exception) -> Exception:
    """Return a refusal; that of a lost ownership in its place, where it may depend on a state that is another's now."""
    if isinstance(error, PostdateError) and not isinstance(error, _NOT_OF_THE_STATE):
        return ownership_lost(ownership) or error
    return error
