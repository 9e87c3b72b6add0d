"""A worker without async: handlers are plain functions, and run in threads. It ends well on Ctrl-C and SIGTERM.

python examples/sync_worker.py orders billing
"""

import os
import sys
import time

import postdate.sync

CONCURRENCY = 8


def handle(message: postdate.sync.Message) -> None:
    """Do the work. The message is acked when this returns; an exception means: try again later."""
    print(f"{message.id} attempt {message.attempt}: {message.payload.decode(errors='replace')}", flush=True)
    time.sleep(0.01)  # blocking is fine here


def main(topic: str, name: str) -> None:
    address = os.environ.get("POSTDATE_ADDRESS", postdate.sync.DEFAULT_ADDRESS)
    with (
        postdate.sync.connect(address) as client,
        client.subscribe(topic, name, permits=4 * CONCURRENCY) as subscription,
    ):
        subscription.run(handle, concurrency=CONCURRENCY)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: sync_worker.py TOPIC SUBSCRIPTION")
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        pass  # by then the handlers have finished
    except postdate.sync.Unavailable as error:
        sys.exit(f"no broker: {error}")
