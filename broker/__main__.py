"""The command `postdate-broker`, also as `python -m broker`: says what to install where the broker lacks something."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator


def main() -> None:
    ending = _Ending()
    atexit.register(ending.leave)  # before all imports: what is registered first is called last
    # NumPy's library of linear algebra, of which nothing is used, would begin a thread for each further processor.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        from broker.runtime.imports import importing  # noqa: PLC0415

        with importing():
            from broker import cli  # noqa: PLC0415
            from broker.observe.logs import configure_logging  # noqa: PLC0415
    except ModuleNotFoundError as error:
        ending.code = 1
        if error.name is None or error.name.partition(".")[0] in {"broker", "postdate", "postdate_api"}:
            raise  # nothing that could be installed
        # The SDK comes with this command, and without what the broker needs.
        sys.exit(
            f"postdate-broker: a part of the broker is not installed ({error}): pip install 'postdate[broker]'"
        )
    # `serve` sets what is set for it; other commands tell of what goes wrong beside their work.
    configure_logging("text", "warning")
    with ending.noted():
        cli.main(prog_name="postdate-broker")


class _Ending:
    """End of the process: without taking the interpreter apart, once the library of object stores was used.

    Its threads give Python objects back a little after a call has ended. One that does so while the interpreter is
    being taken apart aborts the process, so that a command that was carried out would end with signal 6.
    """

    def __init__(self) -> None:
        self.code = 0

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note the exit code of what runs inside."""
        try:
            yield
        except SystemExit as error:
            self.code = error.code if isinstance(error.code, int) else int(error.code is not None)
            raise
        except BaseException:
            self.code = 1
            raise

    def leave(self) -> None:
        if "obstore" not in sys.modules:
            return
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(self.code)


if __name__ == "__main__":
    main()
