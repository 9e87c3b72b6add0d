"""Ids and types between their wire form and ours."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import cast

from pyroaring import BitMap

from broker.errors import InvalidRequest, Unsupported
from broker.model import ENTRY_ID_MAX, LEDGER_ID_MAX, Entries, Position
from broker.subscriptions.subscription import KEY_SHARED, TYPE_NAMES, Failure, Subscription
from postdate.v1 import consumer_pb2, message_pb2


def entries_of(sets: Iterable[message_pb2.EntrySet], field: str) -> tuple[Entries, list[Failure]]:
    """The ids of a request as bitmaps; ids that no message can have are failures at once."""
    entries: Entries = {}
    impossible: list[Failure] = []
    for index, each in enumerate(sets):
        if not each.entry_ids:
            raise InvalidRequest(
                "An EntrySet names no entry", field=f"{field}[{index}].entry_ids", reason="EMPTY_ENTRY_SET"
            )
        ids = each.entry_ids
        if each.ledger_id > LEDGER_ID_MAX or max(ids) > ENTRY_ID_MAX:
            fits = [i for i in ids if each.ledger_id <= LEDGER_ID_MAX and i <= ENTRY_ID_MAX]
            impossible += [
                Failure(Position(each.ledger_id, i), "NOT_FOUND") for i in sorted(set(ids) - set(fits))
            ]
            if not fits:
                continue
            bitmap = BitMap(array("I", fits))
        else:
            bitmap = BitMap(array("I", ids))
        entries[each.ledger_id] = entries[each.ledger_id] | bitmap if each.ledger_id in entries else bitmap
    return entries, impossible


def check_type(type_: int, field: str) -> None:
    """Refuse a subscription type that is none, or none of ours yet."""
    if type_ == KEY_SHARED:
        raise Unsupported("KEY_SHARED is not available yet", reason="KEY_SHARED_NOT_SUPPORTED")
    if type_ not in (0, *TYPE_NAMES):
        raise InvalidRequest(
            f"There is no subscription type {type_}", field=field, reason="INVALID_SUBSCRIPTION_TYPE"
        )


def check_initial_position(position: int, field: str) -> None:
    """Refuse an initial position that is none."""
    if position not in consumer_pb2.InitialPosition.values():
        raise InvalidRequest(
            f"There is no initial position {position}", field=field, reason="INVALID_INITIAL_POSITION"
        )


def api_type(subscription: Subscription) -> consumer_pb2.SubscriptionType:
    """A subscription's type as the API names it; the numbers are the same."""
    return cast("consumer_pb2.SubscriptionType", subscription.type)
