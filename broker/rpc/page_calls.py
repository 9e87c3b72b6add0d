"""The gRPC port as the pages use it: who somebody is, what they may, and calls that are made for them.

A call of a page goes through the interceptors and handlers of the port, with the token of who asks: rights, limits,
errors and the audit trail are those of any other call. It takes no connection, so that it needs no certificate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import grpc
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2

from broker.errors import PermissionDenied
from broker.rpc.access import AccessControl
from broker.rpc.access_identity import Shown
from broker.rpc.access_rules import RULES, Ask, Rule
from broker.rpc.audit_trail import NOT_CHANGES
from broker.rpc.caller import Caller
from broker.rpc.calls import Handler
from broker.rpc.limiter import LimitUse
from broker.rpc.local_context import Behavior, LocalContext, behind
from broker.rpc.port import GrpcPort
from broker.rpc.status import DETAILS_KEY, Context
from postdate_api.v1 import admin_pb2, consumer_pb2, producer_pb2, schedule_pb2


class PageCall(NamedTuple):
    """A call that pages make, or whose right they ask for."""

    path: str
    rule: Rule
    request: type[Message]
    answer: type[Message]


class PageAnswer(NamedTuple):
    """Answer to a call: the status that HTTP has for it, and its fields, or what a refusal says."""

    status: int
    fields: dict[str, Any]


@cache
def _find(name: str) -> PageCall:
    for file in (admin_pb2, schedule_pb2, producer_pb2, consumer_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            method = service.methods_by_name.get(name)
            if method is not None:
                path = f"/{service.full_name}/{name}"
                return PageCall(
                    path, RULES[path], GetMessageClass(method.input_type), GetMessageClass(method.output_type)
                )
    raise KeyError(name)


class PageCalls:
    """See the module's description."""

    def __init__(self, port: GrpcPort, find: Callable[[str], Handler | None], *, has_tls: bool) -> None:
        """`find` returns the handler of a method. `has_tls`: of the port."""
        self._port = port
        self._find = find
        self._has_tls = has_tls
        self._behaviors: dict[str, Behavior] = {}
        self._running: set[asyncio.Task[PageAnswer]] = set()

    @property
    def has_rules(self) -> bool:
        """Return whether there are access rules; without them everybody is alike."""
        return self._port.access is not None

    def identify(self, authorization: str, address: str) -> str:
        """Return whose token it is that somebody shows. Raises Unauthenticated."""
        assert self._port.access is not None
        return self._port.access.identify(authorization, _peer(address))

    def allows(self, principal: str, name: str, topic: str = "", subscription: str = "") -> bool:
        """Return whether somebody may make a call; without a topic, whether of any."""
        access = self._port.access
        if access is None:
            return not self._has_tls or name in NOT_CHANGES
        return all(access.allow(principal, ask) for ask in self._asks(name, topic, subscription))

    def check(self, principal: str, address: str, name: str, topic: str = "", subscription: str = "") -> None:
        """Check that somebody may make a call: PermissionDenied, as the call would be, and noted as that is."""
        access = self._port.access
        if access is None:
            if not self.allows(principal, name):
                raise PermissionDenied(
                    "Without access_file, pages can change nothing while gRPC has TLS: set access_file"
                )
            return
        caller = self._caller(access, principal, address, name)
        for ask in self._asks(name, topic, subscription):
            caller.require(ask)

    def sees_all(self, principal: str) -> bool:
        """Return whether somebody may see what is about the whole broker: who manages all topics."""
        return self.allows(principal, "ListBackups")

    def limits_of(self, topic: str, principal: str) -> Sequence[LimitUse]:
        """Return the limits of a topic that somebody may see.

        Who produces to it sees those that may refuse him, and not what others are allowed; who manages it sees all.
        """
        access = self._port.access
        if access is None:
            return []
        if self.allows(principal, "UpdateTopic", topic):
            return access.limiter.uses(topic)
        return access.limiter.uses(topic, principal) if self.allows(principal, "Produce", topic) else []

    async def call(
        self, name: str, fields: Mapping[str, Any], authorization: str, address: str
    ) -> PageAnswer:
        """Make a call for somebody; `fields` are its request, as JSON has them. Raises PermissionDenied."""
        if not self.has_rules:
            self.check("", address, name)
        task = asyncio.create_task(
            self._call(_find(name), fields, authorization, address), name="call of a page"
        )
        self._running.add(task)  # a task of its own, as who calls is kept in its context
        task.add_done_callback(self._running.discard)
        return await task

    async def _call(
        self, call: PageCall, fields: Mapping[str, Any], authorization: str, address: str
    ) -> PageAnswer:
        # Loaded with the first call: most brokers never have any.
        from google.protobuf import json_format  # noqa: PLC0415

        try:
            message = json_format.ParseDict(dict(fields), call.request()).SerializeToString()
        except json_format.ParseError as error:
            return PageAnswer(400, {"reason": "INVALID_JSON", "detail": " ".join(str(error).split())})
        behavior = self._behaviors.get(call.path)
        if behavior is None:
            behavior = await behind(self._port.interceptors, self._find, call.path)
            self._behaviors[call.path] = behavior
        metadata = (("authorization", authorization),) if authorization else ()
        context = LocalContext(_peer(address), message, metadata)
        try:
            answer = await behavior(None, cast(Context, context))
        except grpc.aio.AbortError:
            return _refusal(context)
        finally:
            context.end()
        told = json_format.MessageToDict(
            call.answer.FromString(answer),
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        return PageAnswer(200, told)

    def _asks(self, name: str, topic: str, subscription: str) -> Iterator[Ask]:
        """Return what must be allowed for a call about a topic, or a subscription of it."""
        rule = _find(name).rule
        yield from rule.always
        if topic and rule.of is not None:
            request: Any = _find(name).request()
            known = request.DESCRIPTOR.fields_by_name
            if "topics" in known:
                request.topics.append(topic)
            else:
                setattr(request, "topic" if "topic" in known else "name", topic)
                if "topic" in known and subscription:
                    setattr(request, "subscription" if "subscription" in known else "name", subscription)
            yield from rule.of(request, cast(Any, None))

    def _caller(self, access: AccessControl, principal: str, address: str, name: str) -> Caller:
        return Caller(access, principal, _find(name).rule, _peer(address), Shown(), is_long=False)


def _peer(address: str) -> str:
    """Return the name of who asks for a page, as gRPC names its peers."""
    return f"http:{address}"


def _refusal(context: LocalContext) -> PageAnswer:
    from broker.rpc.json_calls import facts_of, http_status  # noqa: PLC0415 - as above

    for key, value in context.trailing:
        if key == DETAILS_KEY and isinstance(value, bytes):
            status = status_pb2.Status.FromString(value)
            return PageAnswer(http_status(status), facts_of(status))
    status = status_pb2.Status(code=context.status, message=context.details)
    return PageAnswer(http_status(status), facts_of(status))
