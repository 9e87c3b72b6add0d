"""The description of calls over HTTP in OpenAPI 3.1, made from the descriptors of their messages. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_SCALARS: dict[int, dict[str, Any]] = {
    FieldDescriptor.TYPE_BOOL: {"type": "boolean"},
    FieldDescriptor.TYPE_BYTES: {"type": "string", "contentEncoding": "base64"},
    FieldDescriptor.TYPE_DOUBLE: {"type": "number"},
    FieldDescriptor.TYPE_FLOAT: {"type": "number"},
    FieldDescriptor.TYPE_STRING: {"type": "string"},
    FieldDescriptor.TYPE_INT32: {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
    FieldDescriptor.TYPE_UINT32: {"type": "integer", "minimum": 0, "maximum": 2**32 - 1},
}
# Numbers of 64 bits are strings, as many languages read JSON's numbers as floating point. Numbers are taken as well.
_WIDE = {"type": ["string", "integer"], "format": "int64", "pattern": "^-?[0-9]+$"}
_KNOWN: dict[str, dict[str, Any]] = {"google.protobuf.Any": {"type": "object"}}

_PROBLEM = {
    "type": "object",
    "required": ["title", "status"],
    "properties": {
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string", "description": "The status of the same call over gRPC."},
        "reason": {"type": "string", "description": "One of docs/errors.md."},
        "field": {"type": "string"},
        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
        "retry_after_ms": {"type": "integer"},
    },
}


class DescribedCall(Protocol):
    """A call over gRPC, and its messages."""

    @property
    def path(self) -> str: ...
    @property
    def request(self) -> type[Message]: ...
    @property
    def answer(self) -> type[Message]: ...


def describe_calls(calls: Mapping[str, DescribedCall]) -> dict[str, Any]:
    """Return the document, by the names of the calls."""
    schemas: dict[str, Any] = {"Problem": _PROBLEM}
    paths: dict[str, Any] = {}
    for name, call in calls.items():
        request = _message(call.request.DESCRIPTOR, schemas)
        answer = _message(call.answer.DESCRIPTOR, schemas)
        paths[f"/v1/{name}"] = {
            "post": {
                "operationId": name,
                "summary": f"The call {call.path[1:]}",
                "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
                "responses": {
                    "200": {"description": "Done.", "content": {"application/json": {"schema": answer}}},
                    "default": {
                        "description": "Refused or failed.",
                        "content": {
                            "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
                        },
                    },
                },
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Postdate",
            "version": "v1",
            "description": "Messages that must not arrive before their time. docs/api.md describes calls and fields.",
        },
        "security": [{}, {"token": []}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _message(message: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return a reference to the schema of a message by its descriptor; it is added if it is not there."""
    if message.full_name in _KNOWN:
        return _KNOWN[message.full_name]
    if message.name not in schemas:
        properties: dict[str, Any] = {}
        schemas[message.name] = {"type": "object", "properties": properties}
        for field in message.fields:
            properties[field.name] = _field(field, schemas)
    return {"$ref": f"#/components/schemas/{message.name}"}


def _field(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        return {"type": "object", "additionalProperties": _single(entry.fields_by_name["value"], schemas)}
    single = _single(field, schemas)
    return {"type": "array", "items": single} if field.is_repeated else single


def _single(field: FieldDescriptor, schemas: dict[str, Any]) -> dict[str, Any]:
    if field.message_type is not None:
        return _message(field.message_type, schemas)
    if field.enum_type is not None:
        return {"type": "string", "enum": [value.name for value in field.enum_type.values]}
    return _SCALARS.get(field.type, _WIDE)
