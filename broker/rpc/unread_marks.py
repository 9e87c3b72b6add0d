"""Calls whose clients do not read, and which only the front before this process can end.

Where a client does not read even the status of its call, its connection is cut. A shard has the connections of its
front instead, with the calls of all clients. So it names such calls, by the marks that the front gave them, on the line
of /readyz, which its supervisor reads every second; and the front, which has the client's connection, ends them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_ENDS = "ends calls "
_marks: set[str] = set()  # of this process


@contextmanager
def marked_unread(mark: str) -> Iterator[None]:
    """Name a call meanwhile."""
    _marks.add(mark)
    try:
        yield
    finally:
        _marks.discard(mark)


def ready_line() -> str:
    """Return what /readyz of a shard says where all is well: with the calls that its front is to end."""
    return "; ".join(["ok", *([_ENDS + " ".join(sorted(_marks))] if _marks else [])])


def marks_in(line: str) -> frozenset[str]:
    """Return the calls that such a line names."""
    return frozenset(line.partition(_ENDS)[2].split())
