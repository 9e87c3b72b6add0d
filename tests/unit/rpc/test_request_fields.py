"""Every field of every request is read by somebody: one that is taken and dropped looks to its caller as if it had worked.

A field counts as read where a function of `broker/rpc` names it that takes its very message, by its annotation. Where the
type is not said there is a row here: which function names it. A new field of a request has neither, and fails.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from broker.policy import SubscriptionPolicy, TopicPolicy
from postdate_api.v1 import admin_pb2, compaction_pb2, consumer_pb2, producer_pb2, schedule_pb2

MODULES = (admin_pb2, compaction_pb2, consumer_pb2, producer_pb2, schedule_pb2)
FOLDER = Path(__file__).resolve().parents[3] / "broker" / "rpc"

_CHANGE: dict[str, tuple[str, ...]] = {
    "schedule._change": ("topic", "selector"),
    "schedule._change_named": ("topic", "dry_run"),
}
_CHOSEN: dict[str, tuple[str, ...]] = {"dead_letters._chosen": ("entries", "all")}
READERS: dict[str, dict[str, tuple[str, ...]]] = {
    "CancelScheduledRequest": _CHANGE,
    "RescheduleRequest": _CHANGE,
    "FieldMask": {"control._update": ("paths",), "admin._update_topic": ("paths",)},
    "LedgerOutput": {"compaction._commit": ("ledger_id", "data_bytes", "present_count", "present_bytes")},
    "Message": {
        "decode._read_typed": (
            *("payload", "key", "properties", "deliver_at_ms", "deliver_after_ms"),
            *("schedule_key", "ttl_ms", "sequence_id", "traceparent"),
        )
    },
    "MessageId": {
        "schedule._name_of": ("ledger_id", "entry_id"),
        "control._start_of": ("ledger_id", "entry_id"),
    },
    "Permits": {"session._take_frame": ("messages", "bytes"), "consumer._read_open": ("messages", "bytes")},
    "Open": {"consumer._read_open": ("consumer_name", "permits")},
    "ProduceRequest": {
        "decode.decode_produce": ("topic", "producer_name", "request_id", "replace", "messages"),
        "producer._accept": ("join_answers",),
    },
    "PurgeDeadLettersRequest": _CHOSEN,
    "RequeueDeadLettersRequest": _CHOSEN,
    "RecurringTimes": {"recurring._rule_of": ("times_ms",)},
    "ScheduleFilter": {"bulk_changes._definition_of": ("due", "key_prefix")},
}
"""By message: the functions that read fields of it without saying its type."""
ANY_REQUEST = {"request_id": "request_ids.once"}
"""Read for all requests that have it, by whoever is called with `self._request_ids.once`."""
POLICIES = {
    "TopicPolicy": TopicPolicy,
    "BucketPolicy": TopicPolicy,
    "SubscriptionPolicy": SubscriptionPolicy,
}
"""Read by the names of the fields of these, all of them, by `policies._set_fields`."""
GROUPS = {"TopicPolicy.buckets"}
"""Only hold other fields."""
DELIVERED = {"Message.event_time_ms"}
"""Stored and delivered as they came; nothing of the broker looks at them."""


@cache
def functions() -> dict[str, tuple[set[str], set[str]]]:
    """By name: the attributes and texts that each function of `broker/rpc` names, and the types of its parameters."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = list(ast.walk(node))
                named = {each.attr for each in inner if isinstance(each, ast.Attribute)}
                named |= {str(each.value) for each in inner if isinstance(each, ast.Constant)}
                types = {
                    each.attr
                    for parameter in node.args.args
                    if parameter.annotation is not None
                    for each in ast.walk(parameter.annotation)
                    if isinstance(each, ast.Attribute)
                }
                found[f"{path.stem}.{node.name}"] = (named, types)
    return found


def messages(kind: Any, known: dict[str, Any]) -> Iterator[Any]:
    if kind.full_name not in known and not kind.GetOptions().map_entry:
        known[kind.full_name] = kind
        yield kind
        for field in kind.fields:
            if field.message_type is not None:
                yield from messages(field.message_type, known)


KNOWN: dict[str, Any] = {}
FIELDS = [
    (kind, field.name)
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    for kind in messages(method.input_type, KNOWN)
    for field in kind.fields
]


def is_read(kind: Any, name: str) -> bool:
    if f"{kind.name}.{name}" in GROUPS | DELIVERED:
        return True
    if kind.name in POLICIES:
        return name in {each.name for each in fields(POLICIES[kind.name])}
    if kind.name.endswith("Request") and name in ANY_REQUEST:
        return name in functions()[ANY_REQUEST[name]][0]
    if any(name in named and kind.name in types for named, types in functions().values()):
        return True
    readers = [reader for reader, names in READERS.get(kind.name, {}).items() if name in names]
    return bool(readers) and all(name in functions()[reader][0] for reader in readers)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=[f"{kind.name}.{name}" for kind, name in FIELDS])
def test_every_field_of_every_request_is_read(kind: Any, name: str):
    assert is_read(kind, name), "nobody reads it: read it, or say in READERS who does"


def test_rows_name_fields_that_there_are():
    there = {(kind.name, name) for kind, name in FIELDS}
    rows = {(kind, name) for kind, of in READERS.items() for names in of.values() for name in names}
    assert rows <= there
    assert {tuple(each.split(".")) for each in GROUPS | DELIVERED} <= there


@pytest.mark.slow
def test_a_field_that_nobody_reads_is_found():
    assert not is_read(consumer_pb2.NackRequest.DESCRIPTOR, "later")
    assert not is_read(admin_pb2.TopicPolicy.DESCRIPTOR, "later")
