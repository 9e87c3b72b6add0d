"""Turns a gRPC status, or a `google.rpc.Status` inside an answer, into a typed error."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import timedelta
from types import MappingProxyType
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2

from postdate import errors

_DETAILS_KEY = "grpc-status-details-bin"
_DOMAIN = "postdate.dev"

_TYPES: dict[str, type[errors.PostdateError]] = {
    "INVALID_ARGUMENT": errors.InvalidRequest,
    "OUT_OF_RANGE": errors.OutOfRange,
    "NOT_FOUND": errors.NotFound,
    "ALREADY_EXISTS": errors.AlreadyExists,
    "FAILED_PRECONDITION": errors.FailedPrecondition,
    "RESOURCE_EXHAUSTED": errors.LimitReached,
    "PERMISSION_DENIED": errors.PermissionDenied,
    "UNAUTHENTICATED": errors.Unauthenticated,
    "UNIMPLEMENTED": errors.Unsupported,
    "UNAVAILABLE": errors.Unavailable,
    "DEADLINE_EXCEEDED": errors.DeadlineExceeded,
    "CANCELLED": errors.Disconnected,
    "ABORTED": errors.Disconnected,
}

_UNTRUSTED = {
    r"CERTIFICATE_VERIFY_FAILED: ([^:]+)": "the broker's certificate is not trusted: {}",
    r"Hostname Verification Check failed": "the broker's certificate is not for the name of this address",
    r"WRONG_VERSION_NUMBER": "the broker does not use TLS",
}

_TOO_LARGE = "Received message larger than max"
"""gRPC's words for a request that no broker reads, whenever it is sent."""

# Codes that gRPC itself gives to calls whose connection broke. With a reason they are the broker's own words.
_BROKEN = {"INTERNAL", "UNKNOWN"}


def error_from_rpc(error: grpc.RpcError) -> errors.PostdateError:
    """The typed error of a failed call."""
    assert isinstance(error, grpc.aio.AioRpcError)
    code = error.code().name
    status = status_pb2.Status(message=error.details() or "")
    trailing: Iterable[tuple[str, str | bytes]] = cast(Any, error.trailing_metadata()) or ()
    for key, value in trailing:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                continue  # the status line alone still tells what happened
    if code == "UNAVAILABLE" and (why := _untrusted(status.message)):
        return errors.TlsFailed(why, code=code)
    return _error(code, status)


def _untrusted(message: str) -> str:
    """Return gRPC's reason for refusing the broker's certificate, read from its text; empty if it did not refuse it."""
    for pattern, why in _UNTRUSTED.items():
        if found := re.search(pattern, message):
            return why.format(*found.groups())
    return ""


def error_from_status(status: status_pb2.Status) -> errors.PostdateError:
    """The typed error of one request or one message within an answer."""
    try:
        code = code_pb2.Code.Name(status.code)
    except ValueError:
        code = "UNKNOWN"
    return _error(code, status)


def connection_broke(error: errors.PostdateError) -> bool:
    """Tell whether the call ended for want of a connection, so that a new one may do better."""
    if isinstance(error, errors.Unavailable | errors.Disconnected):
        return True
    return error.code in _BROKEN and not error.reason


def _error(code: str, status: status_pb2.Status) -> errors.PostdateError:
    reason, field, retry_after = "", "", None
    metadata: dict[str, str] = {}
    for detail in status.details:
        kind = detail.TypeName()
        try:
            if kind == "google.rpc.ErrorInfo":
                info = error_details_pb2.ErrorInfo.FromString(detail.value)
                if info.domain == _DOMAIN:  # others, such as a proxy, use other words
                    reason, metadata = info.reason, dict(info.metadata)
            elif kind == "google.rpc.BadRequest":
                violations = error_details_pb2.BadRequest.FromString(detail.value).field_violations
                field = violations[0].field if violations else ""
            elif kind == "google.rpc.RetryInfo":
                delay = error_details_pb2.RetryInfo.FromString(detail.value).retry_delay
                retry_after = timedelta(seconds=delay.seconds, microseconds=delay.nanos // 1000)
        except DecodeError:
            continue  # one garbled detail must not hide the others
    error = errors.LeaseLost if reason == "LEASE_LOST" else _TYPES.get(code, errors.Internal)
    if code == "RESOURCE_EXHAUSTED" and not status.details and _TOO_LARGE in status.message:
        error = errors.InvalidRequest
    return error(
        status.message or code,
        code=code,
        reason=reason,
        field=field,
        metadata=MappingProxyType(metadata),
        retry_after=retry_after,
    )
