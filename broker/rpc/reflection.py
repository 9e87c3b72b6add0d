"""Reflection, by its two names: tools of today ask for v1, older ones for v1alpha, and both are sent the same bytes.

The library has v1alpha alone. The two protos differ in nothing but their package, so one servicer answers for both, and
what describes v1 is the other's description under the other name.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

_aio: Any = vars(reflection)["aio"]  # which its type stubs leave out
_V1ALPHA = "grpc.reflection.v1alpha"
_V1 = "grpc.reflection.v1"
SERVICES = tuple(f"{package}.ServerReflection" for package in (_V1, _V1ALPHA))


def add_reflection(names: Iterable[str], server: grpc.aio.Server) -> None:
    """Let the server tell which services it has: those named, and reflection."""
    _describe_v1()
    servicer = _aio.ReflectionServicer((*names, *SERVICES))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for service in SERVICES:
        handler = grpc.method_handlers_generic_handler(service, {"ServerReflectionInfo": method})
        server.add_generic_rpc_handlers((handler,))


def _describe_v1() -> None:
    described = FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(described)
    described.name, described.package = "grpc/reflection/v1/reflection.proto", _V1
    for message in described.message_type:
        for field in message.field:
            if field.type_name:
                field.type_name = field.type_name.replace(_V1ALPHA, _V1)
    for method in described.service[0].method:
        method.input_type = method.input_type.replace(_V1ALPHA, _V1)
        method.output_type = method.output_type.replace(_V1ALPHA, _V1)
    descriptor_pool.Default().AddSerializedFile(described.SerializeToString())
