"""The way of batches to the broker: several in flight on one stream, answered in order.

    submit -> queue -> (written) -> in flight -> stored | refused | failed

Invariants:
  PIPELINE-1  A batch in `_queue` has not left this process, or the broker has said that nothing of it was
      stored. Sending it is safe whatever happened before.
  PIPELINE-2  Batches in `_in_flight` stand in the order they were written, which is that of the answers.
  PIPELINE-3  A batch that was written and lost its answer may be stored, and a repeat would be a second message. It
      is sent again only with sequence ids, and only to a topic that remembers them: the broker then knows
      the repeat. Otherwise its senders get `Disconnected` and decide.
  PIPELINE-4  At most `in_flight_max` batches are in flight. The queue needs no limit of its own: whoever put
      a batch there awaits it, and a batch that nobody awaits any more is dropped before it leaves.
  PIPELINE-5  Of numbered messages no more are in flight than a topic remembers of a producer by default, or the
      broker could not tell a repeat of the first from a message that is too old. One batch may be larger.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence

from postdate._backoff import Backoff
from postdate._batch import Batch
from postdate._connection import Stream
from postdate._rpc import Rpc
from postdate._status import connection_broke, error_from_status
from postdate._time import moment
from postdate.errors import (
    Closed,
    Disconnected,
    Internal,
    NotFound,
    PostdateError,
    Unauthenticated,
    Unavailable,
)
from postdate.model import IdRange
from postdate_api.v1 import admin_pb2, producer_pb2

_END_GRACE_S = 5.0
_ATTEMPT_S = 0.05
_LOOK_S = 3.0  # without an answer, before it is asked whether there is another owner
_REMEMBERED_MAX = 10_000  # the broker's `dedup_entries`, unless a topic has its own
_log = logging.getLogger("postdate")

ProduceCall = Stream[bytes, producer_pb2.ProduceResponse]


class Pipeline:
    """Carries batches while there is a connection, and keeps them while there is none."""

    def __init__(self, rpc: Rpc, topic: str, *, in_flight_max: int, on_settled: Callable[[], None]) -> None:
        self._rpc = rpc
        self._topic = topic
        self._in_flight_max = in_flight_max
        self._backoff: Backoff = rpc.backoff()
        self._on_settled = on_settled
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Batch] = deque()
        self._in_flight: deque[Batch] = deque()
        self._not_before = 0.0  # loop time; set when the broker asked for patience
        self._next_request_id = 1
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._call: ProduceCall | None = None
        self._closing = False
        self._was_answered = False  # since the token was renewed
        self._task = self._loop.create_task(self._run(), name="postdate-produce")
        self._task.add_done_callback(self._ended)

    @property
    def idle(self) -> bool:
        """Nothing queued, nothing in flight."""
        return not self._queue and not self._in_flight

    @property
    def backed_up(self) -> bool:
        """True while a batch that is submitted would wait."""
        return bool(self._queue)

    def submit(self, batch: Batch) -> None:
        if self._task.done():
            batch.failed(Closed("the producer is closed"))
            return
        batch.deadline = self._loop.time() + self._rpc.retry_for_s
        self._queue.append(batch)
        self._idle.clear()
        self._work.set()

    async def close(self) -> None:
        """Wait until everything is settled, then end the stream."""
        await self._idle.wait()
        self._closing = True
        self._work.set()
        if self._call is None:
            await self.abort()  # there is no stream to end, and it may wait to try again for nobody
        done, _ = await asyncio.wait({self._task}, timeout=_END_GRACE_S)
        if not done:
            await self.abort()

    async def abort(self) -> None:
        """End at once; whoever still waits gets `Disconnected` or `Closed`."""
        self._closing = True
        if self._call is not None:
            self._call.abort()
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _run(self) -> None:
        while True:
            # A connection is made when there is something to send, not before.
            while not self._queue:
                if self._closing:
                    return
                await self._wait_work()
            failure: PostdateError | None = None
            try:
                self._call = await self._rpc.open_produce(self._topic)
                await self._carry(self._call)
            except PostdateError as error:
                failure = error
            finally:
                self._call = None
            if failure is not None:
                await self._recover(failure)

    async def _carry(self, call: ProduceCall) -> None:
        """Write and read until the call ends; raises what ended it unless that was `close`."""
        await call.wait_connected()
        if self._queue and self._queue[0].unsure:
            await self._check_remembered()
        call.accompany(self._write(call), "postdate-produce-writer")
        if self._rpc.owner(self._topic).is_watched:
            call.accompany(self._watch(), "postdate-produce-watch")
        try:
            while (response := await call.read()) is not None:
                self._backoff.succeeded()
                self._was_answered = True
                self._rpc.heard()
                for answer in response.answers or (response,):
                    self._settle(answer)
        finally:
            await call.end()
        if not self._closing:
            raise Unavailable("the broker ended the stream")

    async def _check_remembered(self) -> None:
        """Fail what may not be sent again: its topic would not know the repeat (PIPELINE-3)."""
        try:
            response = await self._rpc.call(
                self._rpc.admin.GetTopic, admin_pb2.GetTopicRequest(name=self._topic)
            )
        except NotFound:
            return  # and nothing of this is stored in a topic that there is not
        if not response.topic.effective_policy.dedup_window_ms:
            self._fail_queue(
                lambda batch: batch.unsure, Disconnected("the topic does not remember sequence ids")
            )

    async def _write(self, call: ProduceCall) -> None:
        while True:
            while not self._may_write():
                if self._closing and not self._queue:
                    await call.half_close()
                    return
                await self._wait_work(self._not_before - self._loop.time())
            batch = self._queue.popleft()
            if batch.abandoned:
                self._settled()
                continue
            batch.request_id = self._next_request_id
            self._next_request_id += 1
            self._in_flight.append(batch)  # from here on its fate is the broker's (PIPELINE-3)
            if not await call.write(batch.encode()):
                return

    async def _watch(self) -> None:
        """Ask other nodes for a later owner while no answer comes; if there is one, the call ends."""
        while True:
            oldest = self._in_flight[0] if self._in_flight else None
            await asyncio.sleep(_LOOK_S)
            if oldest is not None and self._in_flight and self._in_flight[0] is oldest:
                await self._rpc.owner(self._topic).look()

    def _may_write(self) -> bool:
        if not self._queue or len(self._in_flight) >= self._in_flight_max:
            return False
        return self._loop.time() >= self._not_before and self._is_remembered(self._queue[0])

    def _is_remembered(self, batch: Batch) -> bool:
        """Tell whether the broker would remember all that is in flight, with this batch (PIPELINE-5)."""
        if not batch.destination.producer_name or not self._in_flight:
            return True
        count = sum(each.count for each in self._in_flight)
        return count + batch.count <= _REMEMBERED_MAX

    async def _wait_work(self, at_most_s: float = 0.0) -> None:
        self._work.clear()
        if at_most_s > 0:
            timer = self._loop.call_later(at_most_s, self._work.set)
            await self._work.wait()
            timer.cancel()
        else:
            await self._work.wait()

    def _settle(self, response: producer_pb2.ProduceResponse) -> None:
        if not self._in_flight or self._in_flight[0].request_id != response.request_id:
            raise Internal(f"the broker answered request {response.request_id}, which is not the oldest")
        batch = self._in_flight.popleft()
        if response.HasField("error"):
            self._refuse(batch, error_from_status(response.error))
        else:
            batch.stored(_ranges(response))
        self._settled()

    def _refuse(self, batch: Batch, error: PostdateError) -> None:
        """The broker has said that nothing of this batch was stored, so a repeat is safe."""
        if batch.unsure and error.reason == "SEQUENCE_TOO_OLD":
            batch.failed(_unsure(error))  # forgotten, but perhaps stored when it was sent first
            return
        if not isinstance(error, Unavailable):
            self._queue.extendleft(reversed(batch.refused(error)))
            return
        if error.reason == "NOT_OWNER":  # nor does it own what else is on its way
            self._in_flight.appendleft(batch)
            raise error
        self._rpc.owner(self._topic).doubt(error)
        pause_s = self._backoff.next_within(batch.deadline - self._loop.time(), error.retry_after)
        if pause_s is None:
            batch.failed(_unsure(error) if batch.unsure else error)
            return
        # Others in flight may be refused as well. They come after this one, and would come
        # before it if each went to the front, so it goes behind those refused before it.
        self._not_before = max(self._not_before, self._loop.time() + pause_s)
        place = 0
        while place < len(self._queue) and self._queue[place].request_id:
            place += 1
        self._queue.insert(place, batch)

    async def _recover(self, error: PostdateError) -> None:
        cause = f"{error.message} ({self._rpc.address})"
        if connection_broke(error):
            self._rpc.owner(self._topic).doubt(error)
            self._take_back(is_sure=error.reason == "NOT_OWNER")
            self._fail_in_flight(Disconnected(f"the connection broke before the answer came: {cause}"))
            now = self._loop.time()
            hopeless_s = error.retry_after.total_seconds() if error.retry_after is not None else 0.0
            lost = Unavailable(f"nothing was sent: {cause}", code=error.code, reason=error.reason)
            self._fail_queue(lambda batch: batch.deadline <= now + hopeless_s, lost)
            # Those left have a last attempt each when their time is up, though no two sooner than this after another.
            left_s = max(_ATTEMPT_S, min((batch.deadline for batch in self._queue), default=math.inf) - now)
            pause_s = self._backoff.next_within(left_s, error.retry_after) or hopeless_s
            if self._queue:
                self._rpc.tell_absence(error)
        elif isinstance(error, Unauthenticated) and self._was_answered and self._rpc.credentials.can_renew:
            # The token has run out on an open stream: the broker has answered what it took, and took no more.
            self._was_answered = False
            self._queue.extendleft(reversed(self._in_flight))
            self._in_flight.clear()
            pause_s = 0.0
        else:
            pause_s = self._backoff.next_s()
            self._fail_in_flight(error)
            self._fail_queue(lambda _: True, error)
        if not self._closing:
            await asyncio.sleep(pause_s)

    def _take_back(self, *, is_sure: bool) -> None:
        """Send numbered batches again, in the order in which they were sent first, and before all others.

        All others too, if it is sure that nobody has stored them: they met a node that does not own the topic.
        """
        taken = [batch for batch in self._in_flight if is_sure or batch.destination.producer_name]
        for batch in taken:
            batch.unsure = batch.unsure or not is_sure
            self._in_flight.remove(batch)
        again = [*taken, *(batch for batch in self._queue if batch.request_id)]
        again.sort(key=lambda batch: batch.request_id)
        self._queue = deque([*again, *(batch for batch in self._queue if not batch.request_id)])

    def _fail_in_flight(self, error: PostdateError) -> None:
        while self._in_flight:
            self._in_flight.popleft().failed(error)
            self._settled()

    def _fail_queue(self, hopeless: Callable[[Batch], bool], error: PostdateError) -> None:
        kept = deque(batch for batch in self._queue if not hopeless(batch))
        failed = [batch for batch in self._queue if hopeless(batch)]
        self._queue = kept
        for batch in failed:
            batch.failed(_unsure(error) if batch.unsure else error)
            self._settled()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Leave nobody waiting for a task that is no more."""
        fault = None if task.cancelled() else task.exception()
        if fault is not None:
            _log.error("the producer's task failed; this is a bug", exc_info=fault)
        self._fail_in_flight(Disconnected("the producer was closed before the answer came"))
        self._fail_queue(lambda _: True, Closed("the producer was closed; nothing was sent"))
        self._idle.set()

    def _settled(self) -> None:
        if self.idle:
            self._idle.set()
        elif self._queue:
            self._work.set()
        self._on_settled()


def _unsure(error: PostdateError) -> Disconnected:
    """The error of a batch that was written, lost its answer, and cannot be sent again."""
    return Disconnected(
        f"the connection broke before the answer came: {error.message}",
        code=error.code,
        reason=error.reason,
    )


def _ranges(response: producer_pb2.ProduceResponse) -> Sequence[IdRange]:
    publish_time = moment(response.publish_time_ms)
    return [
        IdRange(ids.ledger_id, ids.first_entry_id, ids.count, publish_time, ids.duplicate)
        for ids in response.ids
    ]
