"""Refusals of pages and forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class PageRefusal(Exception):
    """Says so to whoever asked; `status` is HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class CallRefusal(PageRefusal):
    """A call that a page made, and that was refused."""

    def __init__(self, status: int, facts: Mapping[str, Any]) -> None:
        super().__init__(str(facts.get("detail", "")), status)
        self.reason = str(facts.get("reason", ""))
        self.field = str(facts.get("field", ""))
        """The field of the request that is wrong; empty if it is none."""
