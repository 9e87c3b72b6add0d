"""The produce path's decisions: what a batch becomes. Pure: no await, no file, no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from broker.errors import InvalidRequest, Refused
from broker.model import (
    DELIVER_AT_MS_MAX,
    FEW_ROWS,
    FLAG_DELAYED,
    ROW,
    ROW_STRUCT,
    TIME_MS_MAX,
    Batch,
    Int64Column,
    RowColumn,
)
from broker.policy import DELAYED_DISABLED, EffectiveTopicPolicy
from broker.storage.records import Produced, Sequences
from broker.topics.refusals import check_max_delay


@dataclass(frozen=True, slots=True)
class LedgerEnd:
    """End of the log, counting what is submitted and not applied yet: where the next entry goes."""

    ledger_id: int  # 0: the topic has no ledger yet
    entry_count: int
    data_bytes: int
    first_publish_ms: int
    is_sealed: bool = False  # the ledger takes no more: the next batch begins another one


def plan_produced(
    batch: Batch,
    topic_id: int,
    end: LedgerEnd,
    new_ledger_id: Callable[[], int],
    now_ms: int,
    policy: EffectiveTopicPolicy,
    sequences: Sequences | None = None,
) -> Produced:
    """The record of a batch accepted at `now_ms`: ids, ledger roll, effective times and expiry are decided here.

    Raises InvalidRequest, OutOfRange or Refused for a time that cannot be kept; nothing is clamped (P9).
    """
    times = effective_times(batch, now_ms, policy)
    expire_at_ms = _expiry(batch, times, now_ms, policy)
    if must_roll(batch, end, now_ms, policy):
        end = LedgerEnd(new_ledger_id(), 0, 0, now_ms)
    rows = _rows(batch, times, expire_at_ms, end.data_bytes, now_ms)
    return Produced(
        topic_id=topic_id,
        ledger_id=end.ledger_id,
        first_entry_id=end.entry_count,
        publish_time_ms=now_ms,
        times=times,
        rows=rows,
        frames=batch.frames,
        sequences=sequences,
    )


def _rows(
    batch: Batch, times: Int64Column, expire_at_ms: Int64Column, data_bytes: int, now_ms: int
) -> RowColumn:
    """Return the rows of a batch whose frames begin at `data_bytes`."""
    if batch.count <= FEW_ROWS:
        packed = bytearray()
        for time, expire_ms, schedule_hash, length, crc, key_hash in zip(
            times.tolist(),
            expire_at_ms.tolist(),
            batch.schedule_hashes.tolist(),
            batch.lengths.tolist(),
            batch.crcs.tolist(),
            batch.key_hashes.tolist(),
            strict=True,
        ):
            flags = FLAG_DELAYED if time else 0
            packed += ROW_STRUCT.pack(
                now_ms, expire_ms, schedule_hash, data_bytes, length, crc, key_hash, flags, 0
            )
            data_bytes += length
        return np.frombuffer(packed, dtype=ROW)
    rows = np.zeros(batch.count, dtype=ROW)
    rows["publish_time_ms"] = now_ms
    rows["expire_at_ms"] = expire_at_ms
    rows["schedule_hash"] = batch.schedule_hashes
    ends = batch.lengths.cumsum(dtype=np.uint32)  # a ledger's bytes fit, as `must_roll` sees to
    rows["offset"] = ends - batch.lengths + np.uint32(data_bytes)
    rows["length"] = batch.lengths
    rows["crc"] = batch.crcs
    rows["key_hash"] = batch.key_hashes
    rows["flags"] = (times > 0) * np.uint16(FLAG_DELAYED)
    return rows


def must_roll(batch: Batch, end: LedgerEnd, now_ms: int, policy: EffectiveTopicPolicy) -> bool:
    """Return whether a batch begins a new ledger: a batch never spans two."""
    if end.ledger_id == 0 or end.is_sealed:
        return True
    if end.entry_count == 0:
        return False
    age_max_ms = policy.ledger_max_age_ms
    too_old = age_max_ms > 0 and now_ms - end.first_publish_ms >= age_max_ms
    return (
        too_old
        or end.entry_count + batch.count > policy.ledger_max_entries
        or end.data_bytes + len(batch.frames) > policy.ledger_max_bytes
    )


def check_times(batch: Batch, now_ms: int, policy: EffectiveTopicPolicy) -> None:
    """Raise what `plan_produced` would raise."""
    _expiry(batch, effective_times(batch, now_ms, policy), now_ms, policy)


def effective_times(batch: Batch, now_ms: int, policy: EffectiveTopicPolicy) -> Int64Column:
    """Return the due time of each message; 0 for at once. Errors name `messages[i]`."""
    at_ms, after_ms = batch.deliver_at_ms, batch.deliver_after_ms
    if (
        batch.count <= FEW_ROWS
        and (few := _times_of_few(at_ms.tolist(), after_ms.tolist(), now_ms)) is not None
    ):
        return _checked_delays(batch, np.array(few, dtype=np.int64), now_ms, policy)
    after_ms_max = DELIVER_AT_MS_MAX - now_ms
    if not np.count_nonzero(after_ms):  # one of the two, nearly always
        if int(at_ms.min()) >= 0 and int(at_ms.max()) <= DELIVER_AT_MS_MAX:
            return _checked_delays(batch, np.where(at_ms > now_ms, at_ms, 0), now_ms, policy)
    elif not np.count_nonzero(at_ms) and int(after_ms.min()) >= 0 and int(after_ms.max()) <= after_ms_max:
        return _checked_delays(batch, np.where(after_ms > 0, after_ms + now_ms, 0), now_ms, policy)
    sound = ((at_ms == 0) | (after_ms == 0)) & (at_ms >= 0) & (after_ms >= 0)
    if not (sound & (at_ms <= DELIVER_AT_MS_MAX) & (after_ms <= after_ms_max)).all():
        _refuse(at_ms < 0, "deliver_at_ms", "is negative")
        _refuse(after_ms < 0, "deliver_after_ms", "is negative")
        _refuse((at_ms != 0) & (after_ms != 0), "deliver_after_ms", "and deliver_at_ms exclude each other")
        _refuse(at_ms > DELIVER_AT_MS_MAX, "deliver_at_ms", "is after the year 9999: it counts milliseconds")
        _refuse(
            after_ms > after_ms_max, "deliver_after_ms", "ends after the year 9999: it counts milliseconds"
        )
    times = np.where(after_ms > 0, after_ms + now_ms, at_ms)
    return _checked_delays(batch, np.where(times > now_ms, times, 0), now_ms, policy)  # past due: at once


def _times_of_few(at_ms: list[int], after_ms: list[int], now_ms: int) -> list[int] | None:
    """As `effective_times`; None if one of them must be refused."""
    times = []
    for at, after in zip(at_ms, after_ms, strict=True):
        if (at and after) or at < 0 or after < 0 or max(at, after + now_ms) > DELIVER_AT_MS_MAX:
            return None
        time = after + now_ms if after else at
        times.append(time if time > now_ms else 0)
    return times


def _checked_delays(
    batch: Batch, times: Int64Column, now_ms: int, policy: EffectiveTopicPolicy
) -> Int64Column:
    """The times, unless one is too far away, or none may be given."""
    if policy.delayed_delivery == DELAYED_DISABLED:
        _check_none_timed(batch)

    def field(index: int) -> str:
        asked = "deliver_after_ms" if batch.deliver_after_ms[index] else "deliver_at_ms"
        return f"messages[{index}].{asked}"

    check_max_delay(times, now_ms, policy, field)
    return times


def _check_none_timed(batch: Batch) -> None:
    """Refuse messages with a time, also one that is past: who set it expects that it counts."""
    timed = np.flatnonzero(batch.deliver_at_ms | batch.deliver_after_ms)
    if len(timed):
        raise Refused(
            f"messages[{timed[0]}] has a delivery time, and delayed delivery is disabled on this topic",
            reason="DELAYED_DELIVERY_DISABLED",
        )


def _expiry(batch: Batch, times: Int64Column, now_ms: int, policy: EffectiveTopicPolicy) -> Int64Column:
    """Return the expiry of each message, counted from its effective time (P3); 0 for never."""
    ttl_ms = batch.ttl_ms
    if not (policy.default_ttl_ms or np.count_nonzero(ttl_ms)):
        return ttl_ms  # all zero
    _refuse(ttl_ms < 0, "ttl_ms", "is negative")
    _refuse(ttl_ms > TIME_MS_MAX, "ttl_ms", "overflows")
    ttl_ms = np.where(ttl_ms == 0, policy.default_ttl_ms, ttl_ms)
    return np.where(ttl_ms == 0, 0, np.maximum(times, now_ms) + ttl_ms)


def _refuse(wrong: np.ndarray, name: str, why: str) -> None:
    at = np.flatnonzero(wrong)
    if len(at):
        raise InvalidRequest(
            f"{name} {why}", field=f"messages[{at[0]}].{name}", reason=f"INVALID_{name.upper()}"
        )
