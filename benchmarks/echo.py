"""A gRPC server that does nothing, to measure round trips against: `python -m benchmarks.echo PORT`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import uvloop

SERVICE, METHOD, STREAM = "postdate.bench.Echo", "Echo", "EchoStream"
TAKE = "Take"
TAKEN = bytes(8)
"""Answer to each request of `TAKE`."""
_EOF: Any = vars(grpc.aio)["EOF"]


async def _echo(request: bytes, _: Any) -> bytes:
    return request


async def _echo_stream(_: Any, context: Any) -> None:
    while (request := await context.read()) is not _EOF:
        await context.write(request)


async def _take(_: Any, context: Any) -> None:
    while await context.read() is not _EOF:
        await context.write(TAKEN)


async def _serve(port: str) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", -1)])
    handlers: dict[str, Any] = {
        METHOD: grpc.unary_unary_rpc_method_handler(_echo),
        STREAM: grpc.stream_stream_rpc_method_handler(_echo_stream),
        TAKE: grpc.stream_stream_rpc_method_handler(_take),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
