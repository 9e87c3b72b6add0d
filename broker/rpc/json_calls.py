"""Calls whose messages are JSON, for those who come over HTTP.

The protos are the contract: which calls there are and what their messages hold comes from their descriptors, by
protobuf's own mapping to JSON. A call goes through the gRPC port of this process, so that rights, limits and errors are
those of any other call. A refusal becomes a problem (RFC 9457).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from http import HTTPStatus
from typing import Any, NamedTuple, cast

import grpc
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import code_pb2, error_details_pb2, status_pb2

from broker.config import ALL_ADDRESSES
from broker.rpc.openapi import describe_calls
from broker.rpc.status import DETAILS_KEY
from broker.settings import KIB, split_address
from postdate_api.v1 import consumer_pb2, producer_pb2, schedule_pb2

_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
)
_LARGE_BYTES = 64 * KIB
"""From this size on a message is converted in a thread: the loop delivers meanwhile."""
_HTTP_STATUS = {
    code_pb2.CANCELLED: 499,
    code_pb2.INVALID_ARGUMENT: 400,
    code_pb2.DEADLINE_EXCEEDED: 504,
    code_pb2.NOT_FOUND: 404,
    code_pb2.ALREADY_EXISTS: 409,
    code_pb2.PERMISSION_DENIED: 403,
    code_pb2.RESOURCE_EXHAUSTED: 429,
    code_pb2.FAILED_PRECONDITION: 409,
    code_pb2.ABORTED: 409,
    code_pb2.OUT_OF_RANGE: 400,
    code_pb2.UNIMPLEMENTED: 501,
    code_pb2.UNAVAILABLE: 503,
    code_pb2.UNAUTHENTICATED: 401,
}
"""Others are 500."""
_REASON_CHARS_MAX = 500
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]*={0,2}")
_UNKNOWN = re.compile(
    r'Message type "(?P<message>postdate[\w.]+)" has no field named|for enum type (?P<enum>postdate[\w.]+)'
)
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class Call(NamedTuple):
    """A call of the API."""

    path: str  # over gRPC
    request: type[Message]
    answer: type[Message]


class JsonAnswer(NamedTuple):
    """Answer to a call: of HTTP the status and headers, and the body."""

    status: int
    headers: dict[str, str]
    body: bytes


def _calls() -> dict[str, Call]:
    """Return the unary calls of producers, consumers and schedules by their name over HTTP, such as `extend-lease`."""
    calls: dict[str, Call] = {}
    for file in (producer_pb2, consumer_pb2, schedule_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                if not (method.client_streaming or method.server_streaming):
                    calls[re.sub(r"(?<=[a-z])(?=[A-Z])", "-", method.name).lower()] = Call(
                        f"/{service.full_name}/{method.name}",
                        GetMessageClass(method.input_type),
                        GetMessageClass(method.output_type),
                    )
    return calls


CALLS = _calls()


class JsonCalls:
    """See the module's description."""

    def __init__(self, address: Callable[[], str]) -> None:
        """`address`: of the gRPC port, once it listens."""
        self._address = address
        self._channel: grpc.aio.Channel | None = None
        self._converting = asyncio.Lock()

    async def call(
        self, name: str, body: bytes, authorization: str = "", traceparent: str = ""
    ) -> JsonAnswer:
        """Make a call by its name over HTTP. One that is in no trace that W3C describes is in none."""
        call = CALLS.get(name)
        if call is None:
            return self.refusal(404, "CALL_UNKNOWN", f"There is no such call; there are {', '.join(CALLS)}")
        if not _TRACEPARENT.fullmatch(traceparent):
            traceparent = ""
        try:
            request = await self._convert(partial(_parse, traceparent=traceparent), body, call)
        except ValueError as error:
            return self.refusal(400, "INVALID_JSON", str(error))
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(_reachable(self._address()), options=_OPTIONS)
        headers = (("authorization", authorization), ("traceparent", traceparent))
        metadata = tuple((key, value) for key, value in headers if value)
        try:
            answer = await self._channel.unary_unary(call.path, None, None)(request, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            return _problem(_status_of(error))
        rendered = await self._convert(_render, answer, call)
        return JsonAnswer(200, {"Content-Type": "application/json"}, rendered)

    def refusal(self, status: int, reason: str, detail: str) -> JsonAnswer:
        """Return what a request that does not become a call is answered with."""
        return _problem_answer(status, {"reason": reason, "detail": detail}, {})

    async def description(self) -> bytes:
        """Return the OpenAPI document of all calls."""
        return json.dumps(describe_calls(CALLS)).encode()

    async def close(self) -> None:
        """Close the connection to the port."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    async def _convert(self, convert: Callable[[bytes, Call], bytes], data: bytes, call: Call) -> bytes:
        if len(data) <= _LARGE_BYTES:
            return convert(data, call)
        async with self._converting:  # one at a time: what is made of a message is many times its size
            return await asyncio.to_thread(convert, data, call)


def _parse(body: bytes, call: Call, traceparent: str) -> bytes:
    """Return a request on the wire form. Raises ValueError.

    Messages to produce that name no trace are in the one of the request: whoever instruments an HTTP client sets its
    header and nothing else.
    """
    try:
        fields = json.loads(body)
        if not isinstance(fields, dict):
            raise ValueError("not an object")
        _check_bytes(fields, cast(Descriptor, call.request.DESCRIPTOR))
        request = json_format.ParseDict(fields, call.request())
        if isinstance(request, producer_pb2.ProduceRequest):
            for message in request.messages:
                message.traceparent = message.traceparent or traceparent
        return request.SerializeToString()
    except (ValueError, json_format.ParseError, RecursionError) as error:
        # Without protobuf's list of fields, which has names that no document uses.
        why = " ".join(str(error).split(" Available Fields")[0].split()).rstrip(".")
        told = f"{why[:_REASON_CHARS_MAX]}{_choice(why, call)}"
        raise ValueError(f"No {call.request.DESCRIPTOR.name} in JSON: {told}") from error


def _choice(why: str, call: Call) -> str:
    """Return what there is in place of a field or a value of an enum that is not known, by protobuf's words on it.

    The words may quote the request, which may name a type that there is not.
    """
    pool = call.request.DESCRIPTOR.file.pool
    for found in _UNKNOWN.finditer(why):
        with suppress(KeyError):
            if found["message"]:
                names = [field.name for field in pool.FindMessageTypeByName(found["message"]).fields]
            else:
                names = [value.name for value in pool.FindEnumTypeByName(found["enum"]).values]
            return f"; there are {', '.join(names)}"
    return ""


def _check_bytes(value: object, kind: Descriptor, path: str = "") -> None:
    """Refuse texts that are not base64: protobuf passes over their other characters, and takes what is left.

    Raises ValueError.
    """
    if isinstance(value, list):
        for index, each in enumerate(value):
            _check_bytes(each, kind, f"{path}[{index}]")
    if not isinstance(value, dict):
        return
    for field in _with_bytes(kind):
        inner, name = value.get(field.name), f"{path}.{field.name}".lstrip(".")
        if field.message_type is not None:
            _check_bytes(inner, field.message_type, name)
        elif isinstance(inner, str) and not _BASE64.fullmatch(inner):
            raise ValueError(f"{name} is not base64")


@cache
def _with_bytes(kind: Descriptor) -> tuple[FieldDescriptor, ...]:
    """Return the fields that hold bytes, themselves or inside. Both names of such a field are the same."""
    fields = tuple(
        field
        for field in kind.fields
        if field.type == FieldDescriptor.TYPE_BYTES
        or (field.message_type and _with_bytes(field.message_type))
    )
    assert all(field.name == field.json_name for field in fields)
    return fields


def _render(answer: bytes, call: Call) -> bytes:
    fields = json_format.MessageToDict(
        call.answer.FromString(answer),
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )
    return _json(fields)


def _status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == DETAILS_KEY:
            return status_pb2.Status.FromString(value)
    return status_pb2.Status(code=error.code().value[0], message=error.details() or "")


def _problem(status: status_pb2.Status) -> JsonAnswer:
    """Return what a refused call is answered with."""
    facts = facts_of(status)
    headers: dict[str, str] = {}
    if "retry_after_ms" in facts:
        headers["Retry-After"] = str(-(-facts["retry_after_ms"] // 1000))
    return _problem_answer(http_status(status), facts, headers)


def http_status(status: status_pb2.Status) -> int:
    """Return HTTP's status of a refusal."""
    return _HTTP_STATUS.get(status.code, 500)


def facts_of(status: status_pb2.Status) -> dict[str, Any]:
    """Return what a refusal says."""
    facts: dict[str, Any] = {"code": code_pb2.Code.Name(status.code), "detail": status.message}
    info, bad, retry = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
    )
    for detail in status.details:
        if detail.Unpack(info):
            facts |= {"reason": info.reason, "metadata": dict(info.metadata)}
        elif detail.Unpack(bad):
            facts["field"] = bad.field_violations[0].field
        elif detail.Unpack(retry):
            facts["retry_after_ms"] = retry.retry_delay.ToMilliseconds()
    return facts


def _problem_answer(status: int, facts: dict[str, Any], headers: dict[str, str]) -> JsonAnswer:
    title = "Client Closed Request" if status == 499 else HTTPStatus(status).phrase
    body = {"title": title, "status": status} | {key: value for key, value in facts.items() if value}
    if status == HTTPStatus.UNAUTHORIZED:
        headers = headers | {"WWW-Authenticate": "Bearer"}
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        headers = headers | {"Allow": "POST"}
    headers = headers | {"Content-Type": "application/problem+json"}
    return JsonAnswer(status, headers, _json(body))


def _json(fields: dict[str, Any]) -> bytes:
    # With a line's end, for terminals.
    return json.dumps(fields, ensure_ascii=False).encode() + b"\n"


def _reachable(address: str) -> str:
    """Return where this machine reaches a port that may listen on all addresses."""
    host, port = split_address(address)
    if host not in ALL_ADDRESSES:
        return address
    return f"[::1]:{port}" if ":" in host else f"127.0.0.1:{port}"
