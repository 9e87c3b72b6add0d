"""The health service: for load balancers and supervisors; and fronts ask by it which of their calls to end."""

from __future__ import annotations

from grpc_health.v1 import _async as health_aio  # its public name, health.aio, is made at run time
from grpc_health.v1 import health_pb2

from broker.rpc.status import Context
from broker.rpc.unread_clients import tell_unread


class HealthService(health_aio.HealthServicer):  # type: ignore[misc]  # made at run time
    """See the module's description."""

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        tell_unread(context)
        answer: health_pb2.HealthCheckResponse = await super().Check(request, context)
        return answer
