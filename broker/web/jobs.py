"""Changes of many messages: each goes on by itself, page after page, and can be looked at meanwhile."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from broker.errors import PostdateError
from broker.runtime.clock import Clock
from broker.topics.schedule_values import ChangeResult
from broker.web.refusals import PageRefusal

_RUNNING_MAX = 4
_REMEMBERED_MAX = 100


@dataclass(slots=True, eq=False)
class Job:
    """A change of everything that matches a filter."""

    job_id: str
    title: str
    topic: str
    back: str
    expected: int  # as counted before it began
    started_ms: int
    results: Counter[ChangeResult] = field(default_factory=Counter)
    failure: str = ""
    is_stopped: bool = False  # somebody has seen enough
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def looked_at(self) -> int:
        return sum(self.results.values())


class Jobs:
    """The changes that are under way, and the last ones that have ended."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._running: set[asyncio.Task[None]] = set()
        self._jobs: OrderedDict[str, Job] = OrderedDict()

    def find(self, job_id: str) -> Job | None:
        return self._jobs.get(job_id)

    def start(
        self, title: str, topic: str, back: str, expected: int, work: Callable[[Job], Awaitable[None]]
    ) -> Job:
        """Begin a change; refused while too many are under way."""
        if sum(not job.done.is_set() for job in self._jobs.values()) >= _RUNNING_MAX:
            raise PageRefusal(f"{_RUNNING_MAX} changes are under way: wait for one of them to end", 429)
        job = Job(secrets.token_urlsafe(9), title, topic, back, expected, self._clock.now_ms())
        self._jobs[job.job_id] = job
        while len(self._jobs) > _REMEMBERED_MAX:
            oldest = next(name for name, job in self._jobs.items() if job.done.is_set())
            del self._jobs[oldest]
        task = asyncio.create_task(self._run(job, work), name=f"change of {title}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return job

    async def _run(self, job: Job, work: Callable[[Job], Awaitable[None]]) -> None:
        try:
            await work(job)
        except PostdateError as error:
            job.failure = error.told
        except PageRefusal as refusal:
            job.failure = refusal.message
        finally:
            job.done.set()
