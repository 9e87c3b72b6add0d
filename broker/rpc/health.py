"""The health service: for load balancers and supervisors; and fronts ask by it which of their calls to end."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker.rpc.slow_readers import tell_unread
from broker.rpc.status import Context

_STATUSES = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # not typed
    """Tells one status for all services of a port, and for the port as a whole, whose name is empty.

    grpcio-health-checking's own holds a lock while it writes to a client of Watch: one that gives no window for the
    answer keeps the status from everybody, and the broker from its end.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._names = frozenset(("", *services))
        self._is_serving = False
        self._watchers: set[asyncio.Event] = set()

    def tell(self, *, is_serving: bool) -> None:
        """Tell clients whether calls are served from now on."""
        self._is_serving = is_serving
        for changed in self._watchers:
            changed.set()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        tell_unread(context)
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "No service of this broker has that name")
        return self._answer(request)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Write the status now, and the newest one after each change; a client that reads late misses others."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        told = None
        try:
            while True:
                changed.clear()
                if (answer := self._answer(request)) != told:
                    await context.write(answer)
                    told = answer
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _answer(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            return _STATUSES(status=_STATUSES.SERVICE_UNKNOWN)
        return _STATUSES(status=_STATUSES.SERVING if self._is_serving else _STATUSES.NOT_SERVING)
