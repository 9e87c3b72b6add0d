"""Metadata by which a call says which process is to answer it."""

from __future__ import annotations

from typing import Any

from broker.rpc.status import Context

DIRECT = "postdate-direct"
"""Key by which a client asks for the owner alone: any value but an empty one. A front gives each call another one, its
tag (`slow_readers.py`)."""
SHARD = "postdate-shard"
"""Key by which one front names a shard to another: the call is for it, whatever it asks for."""


def metadata_value(context: Context, key: str) -> str:
    """Return the first value of a key; empty without one."""
    given: Any = context.invocation_metadata() or ()
    return next((value for name, value in given if name == key and isinstance(value, str)), "")
