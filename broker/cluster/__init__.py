"""Shards whose journal lies in an object store."""
