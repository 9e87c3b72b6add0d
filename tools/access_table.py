"""Writes the table of rights in docs/security.md from the rules: `python -m tools.access_table`.

Each cell is asked of the very objects that the broker asks: the least grant of a right that is enough for a method.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from google.protobuf import message_factory
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from broker.folder.broker import Broker
from broker.rpc.access_grants import Grants, parse_grants
from broker.rpc.access_rules import RULES, SUBSCRIPTION_RIGHTS, Right, Rule
from postdate_api.v1 import admin_pb2, compaction_pb2, consumer_pb2, producer_pb2, schedule_pb2

DOCUMENT = Path(__file__).parent.parent / "docs" / "security.md"
BEGIN, END = "<!-- Written by `python -m tools.access_table`; a test compares the two. -->", "<!-- End -->"
TOPIC, SUBSCRIPTION, PRINCIPAL = "orders", "billing", "token:somebody"
SCOPES = {
    "subscription": f'topics = ["{TOPIC}"]\nsubscriptions = ["{SUBSCRIPTION}"]\n',
    "topic": f'topics = ["{TOPIC}"]\n',
    "all topics": 'topics = ["*"]\n',
}
"""From the least grant to the greatest."""

_FILES = (producer_pb2, consumer_pb2, schedule_pb2, admin_pb2, compaction_pb2, health_pb2, reflection_pb2)
METHODS: dict[str, Any] = {
    f"/{service.full_name}/{method.name}": method
    for module in _FILES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
# Reflection is served by two names, and the library has the older one.
METHODS |= {path.replace("v1alpha", "v1"): method for path, method in METHODS.items() if "v1alpha" in path}
"""Every method of every service, by its path, as a descriptor."""


def request_of(method: Any, topic: str = TOPIC, subscription: str = SUBSCRIPTION) -> Any:
    """A request that names a topic and a subscription, if it can name them: whether they exist must not matter."""
    request: Any = message_factory.GetMessageClass(method.input_type)()
    target: Any = request.open if method.name == "Subscribe" else request
    fields = target.DESCRIPTOR.fields_by_name
    name = subscription if "topic" in fields else topic
    for field, value in (("topic", topic), ("subscription", subscription), ("name", name)):
        if field in fields and fields[field].type == fields[field].TYPE_STRING:
            setattr(target, field, value)
    if "topics" in fields:
        target.topics.append(topic)
    if "messages" in fields:
        target.messages.add(payload=b"x")
    return request


def grant_of(right: Right, scope: str, principal: str = PRINCIPAL) -> str | None:
    """One grant of the access file; None where there is no such one."""
    if scope == "subscription" and right not in SUBSCRIPTION_RIGHTS:
        return None
    return f'[[grant]]\nprincipals = ["{principal}"]\nrights = ["{right.value}"]\n{SCOPES[scope]}'


def least_scope(path: str, right: Right) -> str:
    """The least grant of a right that is enough for a method; nothing if none is."""
    rule, request = RULES[path], request_of(METHODS[path])
    for scope in SCOPES:
        grant = grant_of(right, scope)
        if grant is not None and _is_allowed(parse_grants(grant), rule, request):
            return scope
    return ""


def _is_allowed(grants: Grants, rule: Rule, request: Any) -> bool:
    lease = SimpleNamespace(compaction_id="", topic=TOPIC)  # the one that an empty request names
    broker = cast("Broker", SimpleNamespace(compactions=SimpleNamespace(leases=lambda: [lease])))
    asked = request.open if hasattr(request, "open") else request
    asks = [*rule.always, *(rule.of(asked, broker) if rule.of is not None else ())]
    return all(grants.allow(PRINCIPAL, ask) for ask in asks)


def render_table() -> str:
    """The lines between BEGIN and END."""
    return "\n".join([BEGIN, "", *_lines(), "", END])


def _lines() -> Iterator[str]:
    rights = [right.value for right in Right]
    yield "| method | " + " | ".join(f"`{right}`" for right in rights) + " |"
    yield "| --- |" + " --- |" * len(rights)
    for path in METHODS:
        cells = (
            ["everybody"] * len(rights) if RULES[path].is_public else [least_scope(path, r) for r in Right]
        )
        yield f"| {row_name(path)} | " + " | ".join(cells) + " |"


def row_name(path: str) -> str:
    """Return the name of a method in the table."""
    return path[1:].removeprefix("postdate.v1.").replace("/", ".")


def replaced(document: str) -> str:
    """The document, with the table as it is now."""
    before, _, rest = document.partition(BEGIN)
    return before + render_table() + rest.partition(END)[2]


if __name__ == "__main__":
    DOCUMENT.write_text(replaced(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
