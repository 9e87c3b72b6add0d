"""A broker with several shards on one machine: a supervisor, a process a shard, and one front."""
