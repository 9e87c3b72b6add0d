"""Refusals of pages and forms."""

from __future__ import annotations


class PageRefusal(Exception):
    """Says so to whoever asked; `status` is HTTP's."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
