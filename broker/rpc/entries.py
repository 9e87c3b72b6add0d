"""Ids and types between their wire form and ours."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import cast

import numpy as np
from pyroaring import BitMap

from broker.errors import InvalidRequest
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, Entries, UInt64Column, distinct_values
from broker.settings import KIB
from broker.subscriptions.requests import FailedIds
from broker.subscriptions.subscription import Subscription
from broker.subscriptions.types import SubscriptionType
from postdate_api.v1 import consumer_pb2, message_pb2

_ID_BYTES_MAX = 32
"""No id takes more on the wire, also alone in its set."""
_REST_BYTES_MAX = 64 * KIB
"""Nothing else of a request that settles takes more, by far."""
_COUNTED_BYTES_MAX = 4 * KIB
"""Of a request whose ids are counted before there is room for its answer: parsed it takes no more than 32 KiB."""


def entries_of(
    sets: Sequence[message_pb2.EntrySet], field: str, ids_max: int
) -> tuple[Entries, list[FailedIds]]:
    """The ids of a request as bitmaps; ids that no message can have are failures at once.

    Refuses more than `ids_max` ids before it looks at one: each may become a failure in the answer.
    """
    count = len(sets)
    if count <= ids_max:  # else not even the sets are walked
        count = ids_in(sets)
    if count > ids_max:
        raise InvalidRequest(
            f"The request names {count} entries or sets of them, over the limit of {ids_max}",
            field=field,
            reason="TOO_MANY_ENTRIES",
            limit=ids_max,
        )
    by_ledger: dict[int, list[int]] = {}
    for index, entry_set in enumerate(sets):
        ids = entry_set.entry_ids[:]
        if not ids:
            raise InvalidRequest(
                "An EntrySet names no entry", field=f"{field}[{index}].entry_ids", reason="EMPTY_ENTRY_SET"
            )
        held = by_ledger.setdefault(entry_set.ledger_id, ids)
        if held is not ids:
            held += ids
    entries: Entries = {}
    ledgers, strangers = list[UInt64Column](), list[UInt64Column]()  # of what cannot be
    for ledger_id, ids in by_ledger.items():
        if ledger_id > LEDGER_ID_MAX or max(ids) > ENTRY_ID_MAX:
            possible = [i for i in ids if i <= ENTRY_ID_MAX] if ledger_id <= LEDGER_ID_MAX else []
            strange = distinct_values(np.array(ids, np.uint64))
            if possible:
                strange = strange[strange > ENTRY_ID_MAX]
            ledgers.append(np.full(len(strange), ledger_id, np.uint64))
            strangers.append(strange)
        else:
            possible = ids
        if possible:
            entries[ledger_id] = BitMap(array("I", possible))
    if not strangers:
        return entries, []
    return entries, [FailedIds(np.concatenate(ledgers), np.concatenate(strangers), "NOT_FOUND")]


def ids_at_most(raw: bytes, count: Callable[[bytes], int], ids_max: int) -> int:
    """Return how many messages a request names at most, which may be told from its length alone.

    An id takes a byte at least, and a request with more than `ids_max` of them is refused. A small request is parsed,
    as its names and its reason would count for more than its ids: `count` does that, or raises InvalidRequest.
    """
    if len(raw) <= _COUNTED_BYTES_MAX:
        with suppress(InvalidRequest):  # it is refused later
            return count(raw)
    return min(len(raw), ids_max)


def ids_in(sets: Iterable[message_pb2.EntrySet]) -> int:
    return sum(len(entry_set.entry_ids) for entry_set in sets)


def check_size(raw: bytes, field: str, ids_max: int) -> None:
    """Refuse a request that is too long to be within the limit, before it is parsed: 16 MiB of ids take seconds."""
    if len(raw) > ids_max * _ID_BYTES_MAX + _REST_BYTES_MAX:
        raise InvalidRequest(
            f"The request has {len(raw)} bytes, more than {ids_max} entries take, which is the limit",
            field=field,
            reason="TOO_MANY_ENTRIES",
            limit=ids_max,
        )


def one_of(names: Sequence[str]) -> str:
    """The names of an enum's values, for a refusal: `A, B or C`."""
    *others, last = names
    return f"{', '.join(others)} or {last}"


def check_type(type_: int, field: str) -> None:
    """Refuse a subscription type that is none."""
    if type_ not in (0, *SubscriptionType):
        raise InvalidRequest(
            f"{field} must be {one_of(consumer_pb2.SubscriptionType.keys())}, not {type_}",
            field=field,
            reason="INVALID_SUBSCRIPTION_TYPE",
        )


def check_initial_position(position: int, field: str) -> None:
    """Refuse an initial position that is none."""
    if position not in consumer_pb2.InitialPosition.values():
        raise InvalidRequest(
            f"{field} must be {one_of(consumer_pb2.InitialPosition.keys())}, not {position}",
            field=field,
            reason="INVALID_INITIAL_POSITION",
        )


def api_type(subscription: Subscription) -> consumer_pb2.SubscriptionType:
    """A subscription's type as the API names it; the numbers are the same."""
    return cast("consumer_pb2.SubscriptionType", subscription.type)


def is_full_view(view: int) -> bool:
    """Return whether a view shows payloads too."""
    if view not in message_pb2.MessageView.values():
        raise InvalidRequest(
            f"view must be {one_of(message_pb2.MessageView.keys())}, not {view}",
            field="view",
            reason="INVALID_VIEW",
        )
    return view == message_pb2.MESSAGE_VIEW_FULL
