"""Streams that end while the answer to a frame has not begun."""

from __future__ import annotations

import asyncio
import gc
import warnings
from typing import Any

import pytest

from broker.testing.sim_clock import SimClock
from broker.testing.sim_loop import SimLoop, run_sim
from postdate_api.v1 import consumer_pb2
from tests.unit.folder.compaction_world import TOPIC
from tests.unit.rpc.call_world import Edge, entries, make_world


class CutEdge(Edge):
    """A stream that is cancelled in the very turn of the loop in which its last frame is read."""

    stream: asyncio.Task[Any]

    async def read(self) -> Any:
        raw = await super().read()
        if not self._frames:
            self.stream.cancel()
        return raw


@pytest.mark.parametrize("kind", ["ack", "nack", "extend"])
def test_a_stream_that_ends_before_a_frame_is_answered_leaves_nothing_behind(kind: str) -> None:
    async def scenario(_: SimLoop, clock: SimClock) -> None:
        world = await make_world(clock)
        opening, frame = consumer_pb2.SubscribeRequest(), consumer_pb2.SubscribeRequest()
        opening.open.topic, opening.open.subscription = TOPIC, "billing"
        getattr(frame, kind).entries.extend(entries(world.dead))
        edge = CutEdge([opening.SerializeToString(), frame.SerializeToString()], half_closes=False)
        subscribe = world.handlers["ConsumerService.Subscribe"].stream_stream
        edge.stream = asyncio.create_task(subscribe(None, edge))
        await asyncio.wait([edge.stream])
        world.inbox.detach()
        await world.node.stop()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run_sim(scenario, seed=1)
        gc.collect()
    assert [str(warning.message) for warning in told if warning.category is RuntimeWarning] == []
