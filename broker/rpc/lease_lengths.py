"""Length of leases: the limit, and what holds where a request names none.

`subscriptions.leases.lease_end_ns` computes when a lease of that length ends.
"""

from __future__ import annotations

from broker.config import BrokerConfig
from broker.errors import InvalidRequest
from broker.subscriptions.subscription import Subscription


def check_lease_ms(lease_ms: int, field: str, config: BrokerConfig, *, is_policy: bool = False) -> int:
    """Return the lease; raise InvalidRequest unless it is within the limit."""
    if not 0 < lease_ms <= config.lease_ms_max:
        raise InvalidRequest(
            f"{field} must be between 1 and {config.lease_ms_max}, not {lease_ms}",
            field=field,
            reason="INVALID_POLICY" if is_policy else "INVALID_LEASE_MS",
        )
    return lease_ms


def default_lease_ms(subscription: Subscription) -> int:
    """Return the lease of a consumer of this subscription that asks for none."""
    return subscription.policy.lease_ms
