"""Work of a client's process: `python -m benchmarks.client WORK JSON`, started by `benchmarks.processes`."""
