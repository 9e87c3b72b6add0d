"""docs/guarantees.md names the tests that show what it says: they are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "guarantees.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_test_that_is_named_is_there():
    named = _TEST.findall(PAGE.read_text())
    missing = []
    for path, name in named:
        file = ROOT / path
        if not file.exists() or (name and f"def {name}(" not in file.read_text()):
            missing.append(f"{path}::{name}" if name else path)
    assert missing == []
    assert len(named) > 20
    assert PAGE.read_text().count("`tests/") == len(named), "a test is named in another form"
