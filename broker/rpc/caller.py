"""The caller of the call that is being served, for whoever decodes what it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from broker.errors import PermissionDenied, PostdateError
from broker.folder.broker import Broker
from broker.rpc.access_identity import Shown
from broker.rpc.access_rules import EVERY_RIGHT, Ask, Right, Rule, SubscriptionScope, TopicScope
from broker.rpc.limiter import Limiter, TakenBatch


class Authorizer(Protocol):
    """The part of `AccessControl` that a caller asks."""

    @property
    def broker(self) -> Broker | None:
        """None where requests are not looked into."""

    @property
    def grants(self) -> object:
        """Those in force now; another object once they have changed."""

    @property
    def limiter(self) -> Limiter:
        """Limits in force, and what callers have used of them."""

    def allow(self, principal: str, ask: Ask) -> bool:
        """Return whether a grant that is in force now is enough."""

    def note_denied(self, caller: Caller, error: PermissionDenied) -> None:
        """Count and log it."""


class Caller:
    """The maker of one call, and what it may do."""

    def __init__(
        self, authorizer: Authorizer, principal: str, rule: Rule, peer: str, shown: Shown, *, is_long: bool
    ) -> None:
        self.principal = principal
        self.peer = peer
        self.shown = shown
        self.is_checked = rule.of is None
        """True once somebody has asked for what the requests need."""
        self.ended: asyncio.Future[PostdateError] | None = (
            asyncio.get_running_loop().create_future() if is_long else None
        )
        """Of a stream, or a call that waits: done once it must end, with what is to be said."""
        self.when_ended: Callable[[], None] | None = None
        """Set by a stream that answers what it has begun, and then ends by itself."""
        self._judge = authorizer
        self._rule = rule
        self._held: list[Ask] = list(rule.always)
        self._allowed_by: object = None
        self._allowed_topic = ""

    @property
    def limiter(self) -> Limiter:
        return self._judge.limiter

    @property
    def must_end(self) -> bool:
        return self.ended is not None and self.ended.done()

    def check_always(self) -> None:
        """Ask for what the method needs whatever is in its requests. Raises PermissionDenied."""
        for ask in self._rule.always:
            self.require(ask)

    def check(self, request: Any) -> None:
        """Ask for what a request needs: PermissionDenied. A stream ends when that is withdrawn."""
        self._held += self._checked(request)

    def check_batch(self, request: Any) -> None:
        """Ask for what one batch of a produce stream needs: PermissionDenied. The stream goes on."""
        # Batch after batch goes to one topic: under the same grants it is asked for once.
        if not self.has_allowed_batch(request.topic):
            grants = self._judge.grants
            self._checked(request)
            self._allowed_by, self._allowed_topic = grants, request.topic

    def has_allowed_batch(self, topic: str) -> bool:
        """Return whether `check_batch` has found, under the grants in force, that batches may go to a topic."""
        return self._allowed_by is self._judge.grants and self._allowed_topic == topic

    def check_held(self) -> None:
        """Ask again for all that the stream was allowed."""
        for ask in self._held:
            self.require(ask)

    def may(self, ask: Ask) -> bool:
        return self._judge.allow(self.principal, ask)

    def take(self, topic: str, messages: int, bytes_: int, *, is_tried: bool = False) -> TakenBatch | None:
        """Count a batch against the limits that hold for it; see `Limiter.take`."""
        return self.limiter.take(self.principal, topic, messages, bytes_, is_tried=is_tried)

    def check_room(self, topic: str, bytes_: int) -> None:
        """Raise what `take` would refuse one message with."""
        if (taken := self.take(topic, 1, bytes_)) is not None:
            taken.refused()

    def count(self, topic: str, messages: int, bytes_: int) -> None:
        """Count what a call has stored; see `Limiter.count`."""
        self.limiter.count(self.principal, topic, messages, bytes_)

    def require(self, ask: Ask) -> None:
        """Ask for one thing: PermissionDenied."""
        if self._judge.allow(self.principal, ask):
            return
        rights = (
            "see" if ask.rights == EVERY_RIGHT else " or ".join(sorted(right.value for right in ask.rights))
        )
        what = ask.topic.value if isinstance(ask.topic, TopicScope) else f"topic {_cut(ask.topic)}"
        if isinstance(ask.subscription, str):
            what = f"subscription {_cut(ask.subscription)} of {what}"
        if not isinstance(ask.topic, TopicScope):
            what += ", whether or not it exists"
        error = PermissionDenied(
            f"{self.principal} may not {rights} {what}",
            principal=self.principal,
            right=rights,
        )
        self._judge.note_denied(self, error)
        raise error

    def end(self, error: PostdateError) -> None:
        """End the stream, once."""
        assert self.ended is not None
        if not self.ended.done():
            self.ended.set_result(error)
            if self.when_ended is not None:
                self.when_ended()

    def _checked(self, request: Any) -> list[Ask]:
        self.is_checked = True
        if self._rule.of is None:
            return []
        broker = self._judge.broker
        assert broker is not None
        asks = list(self._rule.of(request, broker))
        for ask in asks:
            self.require(ask)
        return asks


def _cut(name: str) -> str:
    """A name as it may be shown: it was not checked yet, and may be of any length."""
    return ascii(name if len(name) <= 64 else name[:64] + "...")


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""None where there is no access control, and for methods that are open to all."""


def check_request(request: Any) -> None:
    """Check that the caller may ask for this: PermissionDenied otherwise."""
    if (caller := CALLER.get()) is not None:
        caller.check(request)


@contextmanager
def creating(broker: Broker, topic: str) -> Iterator[None]:
    """Creates a topic if it is not there: LimitReached where the caller may not."""
    caller, topics = CALLER.get(), broker.registry.by_name
    if caller is None or topic in topics:
        yield
        return
    with caller.limiter.creating(caller.principal, topic, lambda: topic in topics):
        yield


def may_see(
    topic: str,
    rights: frozenset[Right] = EVERY_RIGHT,
    subscription: str | SubscriptionScope | None = SubscriptionScope.ANY,
) -> bool:
    """Return whether a list may show this topic, or this subscription of it, to the caller."""
    caller = CALLER.get()
    return caller is None or caller.may(Ask(rights, topic, subscription))
