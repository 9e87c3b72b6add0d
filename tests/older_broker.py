"""`postdate-broker` of an older version, in a process of its own: it does not know the newest record.

Otherwise it is as `tests/tuned_broker.py`: what a version writes that both know is the same.
"""

from __future__ import annotations

from broker.storage import records
from broker.storage.record_types import RecordType
from tests import tuned_broker

NEWEST = RecordType.SUBSCRIPTION_CHANGED

if __name__ == "__main__":
    del records._DECODERS[NEWEST]
    tuned_broker.main()
