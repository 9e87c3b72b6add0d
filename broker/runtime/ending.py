"""The end of a process: its exit code, and nothing after the exit handlers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


class Ending:
    """End of the process without taking the interpreter apart, which takes a broker half a second.

    The library of object stores has threads that give Python objects back a little after a call has ended. One that
    does so while the interpreter is being taken apart aborts the process: a command that was carried out would end with
    signal 6.
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
        """End the process. To be registered as the first exit handler, which is called last."""
        for stream in filter(None, (sys.stdout, sys.stderr)):  # None: it was closed before the process began
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
                stream.flush()
        os._exit(self.code)
