"""Metrics of several processes as one page: each sample with a label `shard`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

_LINES_A_TURN = 1_000
"""Lines of pages between turns of the event loop: a page of many topics would hold up all calls."""


async def merge_metrics(pages: Mapping[str, bytes]) -> bytes:
    """Return one page of metrics in the text format, from those of each shard.

    Lines of a family stand together, as the format demands, in the order in which the pages have them.
    """
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}  # name -> its comments, its samples
    for shard, page in pages.items():
        label = f'shard="{shard}"'.encode()
        name = b""
        for number, line in enumerate(page.splitlines(), 1):
            if number % _LINES_A_TURN == 0:
                await asyncio.sleep(0)
            if line.startswith(b"# "):
                name = line.split(b" ", 3)[2]
                comments, _ = families.setdefault(name, ([], []))
                if line not in comments:
                    comments.append(line)
            elif line:
                families.setdefault(name, ([], []))[1].append(_labelled(line, label))
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    return b"\n".join([*lines, b""])


def _labelled(sample: bytes, label: bytes) -> bytes:
    """Return a sample with one more label, in front of the others."""
    name, brace, rest = sample.partition(b"{")
    if brace and b" " not in name:
        return name + b"{" + label + (b"" if rest.startswith(b"}") else b",") + rest
    name, _, rest = sample.partition(b" ")
    return name + b"{" + label + b"} " + rest
