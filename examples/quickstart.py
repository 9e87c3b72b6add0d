"""Send a message that arrives in two seconds, and receive it.

python examples/quickstart.py            # a broker on 127.0.0.1:7650: make run
"""

import asyncio
import os
import sys
from datetime import UTC, datetime, timedelta

import postdate


async def main() -> None:
    async with postdate.connect(os.environ.get("POSTDATE_ADDRESS", postdate.DEFAULT_ADDRESS)) as client:
        async with client.producer("orders") as producer:
            receipt = await producer.send(
                b"close order 17 unless it is paid", deliver_after=timedelta(seconds=2)
            )
        print(f"{receipt.id} is on the broker's disk, due in two seconds")

        start = postdate.InitialPosition.EARLIEST
        async with client.subscribe("orders", "billing", initial_position=start, limit=1) as subscription:
            async for message in subscription:
                async with message.processing():  # acks at the end, nacks if the block raises
                    late = datetime.now(UTC) - message.deliver_at
                    print(
                        f"{message.payload.decode()!r} came {late.total_seconds() * 1000:.1f} ms after its time"
                    )


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except postdate.Unavailable as error:
        sys.exit(f"no broker: {error}")
