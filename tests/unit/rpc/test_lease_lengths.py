"""Length of leases: what a request may ask for, and how it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.config import BrokerConfig
from broker.errors import InvalidRequest
from broker.rpc.lease_lengths import check_lease_ms

CONFIG = replace(BrokerConfig(), lease_ms_max=60_000)


@pytest.mark.parametrize("lease_ms", [1, 30_000, 60_000])
def test_a_lease_up_to_the_limit_is_taken(lease_ms: int) -> None:
    assert check_lease_ms(lease_ms, "lease_ms", CONFIG) == lease_ms


@pytest.mark.parametrize("lease_ms", [-1, 0, 60_001, 1 << 62])
@pytest.mark.parametrize(
    ("is_policy", "reason"),
    [(False, "INVALID_LEASE_MS"), (True, "INVALID_POLICY")],
    ids=["request", "policy"],
)
def test_any_other_lease_is_refused_with_its_field_and_the_limit(
    lease_ms: int, is_policy: bool, reason: str
) -> None:
    with pytest.raises(
        InvalidRequest, match=rf"open\.lease_ms must be between 1 and 60000, not {lease_ms}"
    ) as refusal:
        check_lease_ms(lease_ms, "open.lease_ms", CONFIG, is_policy=is_policy)
    assert refusal.value.reason == reason
    assert refusal.value.field == "open.lease_ms"
