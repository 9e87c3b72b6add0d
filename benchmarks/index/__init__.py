"""Work of the process of an index-only row: `python -m benchmarks.index WORK JSON`.

A `BucketTracker` with its upkeep and local files, filled by a loop that stands for the broker's pump: no gRPC, no
payloads, no journal. Started by `benchmarks.index_scenarios`; needs nothing of gRPC, so that memory is the index's.
"""
