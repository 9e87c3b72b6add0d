"""A worker that processes messages side by side, retries what fails, and ends well on Ctrl-C and SIGTERM.

python examples/worker.py orders billing
"""

import asyncio
import os
import sys
from datetime import timedelta

import postdate

CONCURRENCY = 32
RETRY = timedelta(seconds=30)
ATTEMPTS_MAX = 5


async def handle(message: postdate.Message) -> None:
    """Do the work. The message is acked when this returns; an exception means: try again later."""
    try:
        print(f"{message.id} attempt {message.attempt}: {message.payload.decode()}")
    except UnicodeDecodeError:
        if message.attempt >= ATTEMPTS_MAX:
            await message.nack(dead_letter=True, reason="not UTF-8")  # settled by us: `run` leaves it alone
        else:
            await message.nack(RETRY)


async def main(topic: str, name: str) -> None:
    address = os.environ.get("POSTDATE_ADDRESS", postdate.DEFAULT_ADDRESS)
    async with (
        postdate.connect(address) as client,
        client.subscribe(topic, name, permits=4 * CONCURRENCY) as subscription,
    ):
        await subscription.run(handle, concurrency=CONCURRENCY)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: worker.py TOPIC SUBSCRIPTION")
    try:
        asyncio.run(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        pass  # by then the handlers have finished
    except postdate.Unavailable as error:
        sys.exit(f"no broker: {error}")
