"""A worker that processes messages in several tasks, retries what fails, and ends well on Ctrl-C.

python examples/worker.py orders billing
"""

import asyncio
import os
import signal
import sys
from datetime import timedelta

import postdate

TASKS = 32
RETRY = timedelta(seconds=30)
ATTEMPTS_MAX = 5


async def handle(message: postdate.Message) -> None:
    """What you would do. An exception here means: try again later."""
    print(f"{message.id} attempt {message.attempt}: {message.payload.decode(errors='replace')}")


async def work(subscription: postdate.Subscription) -> None:
    # All tasks share one stream. Their acks travel together, so 32 tasks confirm far more than
    # 32 times what one does that waits for each confirmation.
    async for message in subscription:
        try:
            async with message.processing():  # keeps the lease, however long it takes
                try:
                    await handle(message)
                except ValueError:
                    if message.attempt >= ATTEMPTS_MAX:
                        raise
                    await message.nack(RETRY)  # settled by us: `processing` leaves it alone
        except Exception as error:
            print(f"{message.id} failed: {error}", file=sys.stderr)  # nacked, comes back after the back-off


async def main(topic: str, name: str) -> None:
    address = os.environ.get("POSTDATE_ADDRESS", postdate.DEFAULT_ADDRESS)
    async with (
        postdate.connect(address) as client,
        client.subscribe(topic, name, permits=4 * TASKS) as subscription,
    ):
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, subscription.stop)  # takes no more; acks are still confirmed
        async with asyncio.TaskGroup() as tasks:
            for _ in range(TASKS):
                tasks.create_task(work(subscription))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:3]))
