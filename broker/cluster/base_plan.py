"""Rules of uploads, removals and sweeps: chunks to rely on, bases and chunks that may go. Pure; times are the store's.

Nothing in the store is ever overwritten, so a chunk that lies there cannot be made young again. What keeps a base
whole while others are uploaded, removed and swept at the same time, from any machine:

  KEEP-1  An upload ends within `UPLOAD_MS`, or never names anything.
  KEEP-2  It relies on a chunk only if it stored it, or the newest base of its broker named it when it began, or it was
          younger than `TRUSTED_MS` then. Another one it stores again.
  KEEP-3  A base is removed only when two newer ones of its broker have been there for `REST_MS`.
  KEEP-4  A chunk is removed only when no manifest names it, and it was older than `REST_MS` before these were listed.
  KEEP-5  A name is given once: it ends in a nonce of its upload. A removal that is carried out late, by a store or by a
          sweep that slept, meets nothing that was stored since.

So a chunk that KEEP-2 allows is not removed before `REST_MS` less `TRUSTED_MS` have passed, or `REST_MS` after its base
ceased to be the newest; both are longer than KEEP-1 gives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from broker.cluster.base_manifest import Base, digest_of, is_chunk_name
from broker.cluster.object_store import ObjectInfo
from broker.errors import NotFound

HOUR_MS = 3_600_000
UPLOAD_MS = 6 * HOUR_MS
TRUSTED_MS = 12 * HOUR_MS
REST_MS = 24 * HOUR_MS

_KEPT_ALWAYS = 2


@dataclass(frozen=True, slots=True)
class StoredBase:
    """A base, and when its manifest was stored."""

    base: Base
    modified_ms: int


class ChunkChoice(NamedTuple):
    """The name of a chunk, and whether it is there already."""

    name: str
    is_stored: bool


class ChunkPlan:
    """Chunks that one upload may rely on."""

    def __init__(
        self, named: AbstractSet[str], present: Iterable[ObjectInfo], now_ms: int, nonce: str
    ) -> None:
        """`named` by the newest base; `present` as listed after `now_ms`, names without their folder."""
        self._nonce = nonce
        self._sizes: dict[str, int] = {}  # of all chunks that are there
        self._usable: dict[tuple[str, int], str] = {}  # by digest and size
        for info in present:
            if is_chunk_name(info.name):
                self._sizes[info.name] = info.bytes
                if info.name in named or now_ms - info.modified_ms < TRUSTED_MS:
                    self._usable[digest_of(info.name), info.bytes] = info.name

    def has(self, name: str, size: int) -> bool:
        """Return whether a chunk of the newest base is still there."""
        return self._sizes.get(name) == size

    def choose(self, digest: str, size: int) -> ChunkChoice:
        """Return the name under which bytes of this digest are, or are to be stored."""
        usable = self._usable.get((digest, size))
        return ChunkChoice(usable or f"{digest}-{self._nonce}", usable is not None)

    def note_stored(self, name: str, size: int) -> None:
        self._usable[digest_of(name), size] = name


def newest_base(bases: Iterable[StoredBase], broker_id: str) -> StoredBase | None:
    """Return a broker's newest base: the one with the greatest lsn, the later one of two."""
    own = [stored for stored in bases if stored.base.broker_id == broker_id]
    return max(own, key=lambda stored: stored.base.name, default=None)


def choose_base(bases: Iterable[StoredBase], name: str, url: str) -> Base:
    """Return the base of a name, or the newest if the name is empty. Raises NotFound, also if that is unclear."""
    named = {stored.base.name: stored for stored in bases}
    if name and name not in named:
        raise no_base(url, name)
    if name:
        return named[name].base
    brokers = sorted({stored.base.broker_id for stored in named.values()})
    if len(brokers) > 1:
        newest = [newest_base(named.values(), broker_id) for broker_id in brokers]
        names = ", ".join(stored.base.name for stored in newest if stored is not None)
        raise NotFound(
            f"{url} has bases of {len(brokers)} brokers: name one of them, as in {url}#NAME. Their newest: {names}",
            reason="BACKUP_NOT_FOUND",
        )
    if not brokers:
        raise NotFound(f"{url} has no base", reason="BACKUP_NOT_FOUND")
    newest_stored = newest_base(named.values(), brokers[0])
    assert newest_stored is not None
    return newest_stored.base


def no_base(url: str, name: str) -> NotFound:
    return NotFound(f"{url} has no base {name!a}", reason="BACKUP_NOT_FOUND")


def removable_from_ms(bases: Collection[StoredBase], name: str) -> int | None:
    """Return from when on a base may be removed (KEEP-3); None while there are not two newer ones."""
    broker_id = next(stored.base.broker_id for stored in bases if stored.base.name == name)
    newer = sorted(
        stored.modified_ms
        for stored in bases
        if stored.base.broker_id == broker_id and stored.base.name > name
    )
    return newer[_KEPT_ALWAYS - 1] + REST_MS if len(newer) >= _KEPT_ALWAYS else None


def plan_retention(
    bases: Sequence[StoredBase], broker_id: str, now_ms: int, keep_count: int, max_age_ms: int
) -> list[str]:
    """Names of a broker's bases that are too many or too old, and may go. 0 means no limit."""
    own = sorted(
        (stored for stored in bases if stored.base.broker_id == broker_id),
        key=lambda stored: stored.base.name,
        reverse=True,
    )
    names = []
    for index, stored in enumerate(own):
        is_surplus = bool(keep_count) and index >= keep_count
        is_old = bool(max_age_ms) and now_ms - stored.modified_ms > max_age_ms
        from_ms = removable_from_ms(own, stored.base.name)
        if (is_surplus or is_old) and from_ms is not None and from_ms <= now_ms:
            names.append(stored.base.name)
    return names


def plan_sweep(chunks: Iterable[ObjectInfo], named: AbstractSet[str], now_ms: int) -> list[str]:
    """Names of chunks that may go (KEEP-4); `named` by all manifests that were there after `now_ms`."""
    return [
        info.name
        for info in chunks
        if is_chunk_name(info.name) and info.name not in named and now_ms - info.modified_ms >= REST_MS
    ]
