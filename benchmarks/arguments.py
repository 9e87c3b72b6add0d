"""Types of arguments: what they refuse, argparse says in a line."""

from __future__ import annotations

import tempfile
from argparse import ArgumentTypeError
from pathlib import Path


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text} is not a whole number from 1")
    return int(text)


def checkout(text: str) -> Path:
    """A folder whose broker and SDK can be measured."""
    path = Path(text)
    if not ((path / "broker").is_dir() and (path / "clients/python/postdate").is_dir()):
        raise ArgumentTypeError(f"{text} is no checkout of Postdate")
    return path


def writable_folder(text: str) -> Path:
    """A folder for files, made if there is none."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return path
