"""The table of `cluster status`: what the nodes of a cluster say of themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node's answer about one shard; `problem` says why there is none."""

    name: str
    address: str
    shard: int = 0
    problem: str = ""
    epoch: int = 0
    owner: str = ""
    applied_lsn: int = 0
    applied_time_ms: int = 0
    base_lsn: int = 0
    base_time_ms: int = 0

    @property
    def is_owner(self) -> bool:
        return bool(self.owner) and self.owner == self.name


def render_status(cluster_id: str, nodes: Sequence[NodeStatus], now_ms: int) -> Iterator[str]:
    """Return the lines of a table for each shard: the owner's epoch, and how far each standby is behind it."""
    if not cluster_id:
        yield "no cluster: one broker, which owns all topics"
        return
    numbers = sorted({node.shard for node in nodes})
    yield f"cluster {cluster_id}" + (f", {len(numbers)} shards" if len(numbers) > 1 else "")
    for number in numbers:
        heading = f"shard {number}: " if len(numbers) > 1 else ""
        yield from _render_shard(heading, [node for node in nodes if node.shard == number], now_ms)


def is_owned(nodes: Sequence[NodeStatus]) -> bool:
    """Return whether each shard has an owner that says so itself."""
    return {node.shard for node in nodes} == {node.shard for node in nodes if node.is_owner}


def _render_shard(heading: str, nodes: Sequence[NodeStatus], now_ms: int) -> Iterator[str]:
    answers = [node for node in nodes if not node.problem]
    newest = max(answers, key=lambda node: (node.epoch, node.is_owner), default=None)
    if newest is None:
        yield f"{heading}no node answers"
    elif newest.owner:
        yield f"{heading}owner {newest.owner}, epoch {newest.epoch}"
    else:
        yield f"{heading}no owner is known; the last epoch was {newest.epoch}"
    owner = next((node for node in answers if newest is not None and node.name == newest.owner), None)
    for node in nodes:
        yield f"  {node.name}  {node.address}  {_describe(node, owner, now_ms)}"
    base = max(answers, key=lambda node: node.base_lsn, default=None)
    indent = "  " if heading else ""
    if base is not None and base.base_lsn:
        yield f"{indent}newest base: lsn {base.base_lsn}, {format_span(now_ms - base.base_time_ms)} old"
    else:
        yield f"{indent}newest base: none yet"


def _describe(node: NodeStatus, owner: NodeStatus | None, now_ms: int) -> str:
    if node.problem:
        return f"no answer: {node.problem}"
    if node is owner:
        return f"owner    lsn {node.applied_lsn}"
    if owner is None or owner.epoch > node.epoch:
        return f"standby  lsn {node.applied_lsn}"
    records = max(0, owner.applied_lsn - node.applied_lsn)
    return f"standby  lsn {node.applied_lsn}  {records} records, {format_span(now_ms - node.applied_time_ms)} behind"


def format_span(milliseconds: int) -> str:
    """Return a time as seconds, minutes or hours."""
    seconds = max(0, milliseconds) / 1000
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.0f} h"
