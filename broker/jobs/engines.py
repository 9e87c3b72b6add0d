"""The engines that the options `--engine` and `--master` name."""

from __future__ import annotations

from broker.jobs.engine import Engine, InlineEngine
from broker.jobs.spark import SparkEngine


def choose_engine(name: str, master: str) -> Engine:
    """Nothing is started yet, nor looked for."""
    return InlineEngine() if name == "inline" else SparkEngine(master)
