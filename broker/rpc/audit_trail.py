"""The calls that are changes, and what the audit trail says of them.

Every unary call is one unless it is named here as none: a new method is audited until somebody says otherwise.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any

from google.protobuf.message import Message

from broker.errors import PostdateError
from broker.folder.broker import Broker
from broker.rpc.caller import CALLER
from broker.rpc.status import Context

NOT_CHANGES = frozenset(
    {
        # What clients do to messages all day: metrics count it.
        "Receive",
        "Acknowledge",
        "Nack",
        "ExtendLease",
        # What only looks.
        "GetScheduled",
        "ListScheduled",
        "CountScheduled",
        "GetBulkChange",
        "ListBulkChanges",
        "GetRecurring",
        "ListRecurring",
        "PreviewRecurring",
        "GetTopic",
        "ListTopics",
        "GetSubscription",
        "ListSubscriptions",
        "ListDeadLetters",
        "ListOwed",
        "GetStats",
        "VerifyTopic",
        "GetServerInfo",
        "GetCluster",
        "ListBackups",
        "ListCompactions",
    }
)
"""Methods, by their names."""

_ITEMS_MAX = 5
_TEXT_CHARACTERS_MAX = 200
CONTEXT: ContextVar[Context | None] = ContextVar("context", default=None)
"""The call that is being answered, set by whatever answers it."""
_COUNTS: ContextVar[dict[str, int] | None] = ContextVar("counts of a change", default=None)


async def audited(
    broker: Broker, context: Context, request: Any, call: Callable[[Any], Awaitable[Any]]
) -> Any:
    """Make a call, and note it if it is a change."""
    CONTEXT.set(context)
    action = request.DESCRIPTOR.name.removesuffix("Request")
    if action in NOT_CHANGES or getattr(request, "dry_run", False):
        return await call(request)
    counts: dict[str, int] = {}
    _COUNTS.set(counts)
    result = "INTERNAL"
    try:
        response = await call(request)
        result = "done"
        if isinstance(response, Message):
            counts |= _counts_of(response)
    except asyncio.CancelledError:
        result = "the caller went away"  # it may be done all the same
        raise
    except PostdateError as error:
        result = error.reason
        raise
    finally:
        principal, peer = _who()
        broker.audit.note(
            action,
            result,
            principal=principal,
            peer=peer,
            topic=topic_of(request),
            details=_fields(request) | counts,
        )
    return response


def topic_of(request: Any) -> str:
    """Return the topic that a request names; empty if none."""
    is_of_topic = request.DESCRIPTOR.name.endswith("TopicRequest")
    topic: str = getattr(request, "topic", "") or (getattr(request, "name", "") if is_of_topic else "")
    return topic


def note_created(broker: Broker, topic: str, subscription: str = "") -> None:
    """A request that asks for something else has created what was not there."""
    principal, peer = _who()
    action = "CreateSubscription" if subscription else "CreateTopic"
    details = {"asked_name": subscription} if subscription else {}
    broker.audit.note(action, "done", principal=principal, peer=peer, topic=topic, details=details)


def note_counts(**counts: int) -> None:
    """Say how many messages the call that is being made has changed."""
    if (noted := _COUNTS.get()) is not None:
        noted |= counts


def _who() -> tuple[str, str]:
    """The principal, and where it calls from."""
    caller, context = CALLER.get(), CONTEXT.get()
    if caller is not None:
        return caller.principal, caller.peer
    return "anonymous", context.peer() if context is not None else ""


def _counts_of(response: Message) -> dict[str, int]:
    """The numbers that an answer has at its top: messages skipped, requeued, purged."""
    return {
        field.name: value
        for field, value in response.ListFields()
        if field.name.endswith("_messages") and isinstance(value, int)
    }


def _fields(request: Message) -> dict[str, object]:
    """Return what a request asks for, but its topic: of a list only the first items, of a text only its beginning."""
    return {f"asked_{name}": value for name, value in _shown(request) if name != "topic"}


def _shown(message: Message) -> Iterator[tuple[str, object]]:
    for field, value in message.ListFields():
        if isinstance(value, int):
            named = field.enum_type.values_by_number.get(value) if field.enum_type is not None else None
            yield field.name, value if named is None else named.name
        elif isinstance(value, str | bytes | float | Message):
            yield field.name, _text(value)
        else:  # repeated
            items = [_text(item) for item in itertools.islice(value, _ITEMS_MAX)]
            rest = [f"... {len(value)} in all"] if len(value) > _ITEMS_MAX else []
            yield field.name, ", ".join(items + rest)


def _text(value: object) -> str:
    if isinstance(value, Message):
        return "{" + " ".join(f"{name}={_text(part)}" for name, part in _shown(value)) + "}"
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[:_TEXT_CHARACTERS_MAX] + "..."
