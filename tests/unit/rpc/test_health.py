"""Health as its watchers hear of it, whenever they read."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from grpc_health.v1 import health_pb2

from broker.rpc.health import HealthService
from broker.rpc.status import Context
from broker.testing.sim_loop import run_sim

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class SlowReader:
    """A client of Watch that reads each status when it is let."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.may_read = asyncio.Event()

    async def write(self, answer: Any) -> None:
        await self.may_read.wait()
        self.read.append(answer.status)


def test_a_status_that_changes_while_the_one_before_is_read_is_told() -> None:
    async def scenario(*_: object) -> None:
        health, reader = HealthService(("postdate.v1.ProducerService",)), SlowReader()
        health.tell(is_serving=True)
        watching = asyncio.ensure_future(health.Watch(health_pb2.HealthCheckRequest(), cast(Context, reader)))
        await asyncio.sleep(1)
        health.tell(is_serving=False)  # a broker that drains tells nothing after this
        reader.may_read.set()
        await asyncio.sleep(1)
        assert reader.read == [SERVING, NOT_SERVING]
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    run_sim(scenario, seed=1)
