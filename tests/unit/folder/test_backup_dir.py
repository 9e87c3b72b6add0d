"""Folders of backups, and where they may not lie."""

from __future__ import annotations

import pytest

from broker.config import load_config
from broker.folder.backup import backup_folder
from broker.settings import ConfigError


@pytest.mark.parametrize(
    ("backup_dir", "folder"),
    [
        ("auto", "/d/data/backups"),
        ("/elsewhere/b/", "/elsewhere/b"),
        ("/d", "/d"),
        ("/d/data/b", "/d/data/b"),
    ],
)
def test_backups_lie_in_the_data_directory_unless_told_otherwise(backup_dir, folder):
    config = load_config({"data_dir": "/d/data", "backup_dir": backup_dir}, {})
    assert backup_folder(config) == folder


@pytest.mark.parametrize(
    "backup_dir",
    [
        "/d/data",
        "/d/data/",
        "/d/data/topics",
        "/d/x/../data/topics/b",
        "/d/data/journal",
        "/d/data/backup.pins/x",
    ],
)
def test_backups_do_not_lie_among_the_brokers_own_files(backup_dir):
    with pytest.raises(ConfigError, match="backup_dir"):
        load_config({"data_dir": "/d/data", "backup_dir": backup_dir}, {})
