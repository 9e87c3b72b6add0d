"""A worker that takes the messages of a topic with partitions in batches: work together, ack together.

python examples/partitions.py payments billing 8
"""

import asyncio
import os
import sys
from collections.abc import Sequence
from datetime import timedelta

import postdate

BATCH = 500
PATIENCE = timedelta(seconds=5)


def handle(messages: Sequence[postdate.Message]) -> None:
    """Do the work for all of them, as one statement of a database would."""
    partitions = len({message.topic for message in messages})
    print(
        f"{len(messages)} messages of {partitions} partitions: {sum(int(each.payload) for each in messages)}"
    )


async def main(topic: str, name: str, partitions: int) -> None:
    address = os.environ.get("POSTDATE_ADDRESS", postdate.DEFAULT_ADDRESS)
    async with (
        postdate.connect(address) as client,
        client.subscribe_partitioned(topic, name, partitions=partitions, permits=2 * BATCH) as subscription,
    ):
        while messages := await subscription.receive_many(BATCH, PATIENCE):
            handle(messages)
            await subscription.ack_many(messages)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("usage: partitions.py TOPIC SUBSCRIPTION PARTITIONS")
    try:
        asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
    except postdate.Unavailable as error:
        sys.exit(f"no broker: {error}")
