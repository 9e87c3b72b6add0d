"""Metrics of several processes as one page: each sample with a label `shard`. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def merge_metrics(pages: Mapping[str, bytes]) -> bytes:
    """Return one page of metrics in the text format, from those of each shard.

    Lines of a family stand together, as the format demands, in the order in which the pages have them.
    """
    families: dict[bytes, tuple[list[bytes], list[bytes]]] = {}  # name -> its comments, its samples
    for shard, page in pages.items():
        label = f'shard="{shard}"'.encode()
        name = b""
        for line in page.splitlines():
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
