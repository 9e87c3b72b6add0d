"""A gRPC server that does nothing: the yardstick for a round trip. `python -m benchmarks.echo PORT`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import uvloop

SERVICE, METHOD = "postdate.bench.Echo", "Echo"


async def _echo(request: bytes, _: Any) -> bytes:
    return request


async def _serve(port: str) -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    handlers = {METHOD: grpc.unary_unary_rpc_method_handler(_echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
