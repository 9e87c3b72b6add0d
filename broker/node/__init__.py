"""A node of a cluster: seeds itself, follows a shard, takes it over, owns it."""
