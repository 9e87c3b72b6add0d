"""The command `postdate-broker`, also as `python -m broker`: says what to install where the broker lacks something."""

from __future__ import annotations

import atexit
import os
import sys

from broker.runtime.ending import Ending


def main() -> None:
    ending = Ending()
    atexit.register(ending.leave)  # before all other imports: what is registered first is called last
    with ending.noted():
        _run()


def _run() -> None:
    # NumPy's library of linear algebra, of which nothing is used, would begin a thread for each further processor.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from broker.runtime.imports import importing  # noqa: PLC0415

        with importing():
            from broker import cli  # noqa: PLC0415
            from broker.observe.logs import configure_logging  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in {"broker", "postdate", "postdate_api"}:
            raise  # nothing that could be installed
        # The SDK comes with this command, and without what the broker needs.
        sys.exit(
            f"postdate-broker: a part of the broker is not installed ({error}): pip install 'postdate[broker]'"
        )
    # `serve` sets what is set for it; other commands tell of what goes wrong beside their work.
    configure_logging("text", "warning")
    cli.main(prog_name="postdate-broker")


if __name__ == "__main__":
    main()
