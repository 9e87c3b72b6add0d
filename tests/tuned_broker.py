"""`postdate-broker` with small parts, in a process of its own.

TUNING='{"ledger_max_entries": "2", "seal_after_ms": "100ms"}' python -m tests.tuned_broker serve --data-dir d
"""

from __future__ import annotations

import json
import os
from typing import Any

from broker import cli, config
from broker.policy import POLICY_SPECS
from broker.settings import Setting, count, duration, parse_setting, size
from tests.configs import changed

MANY = 1 << 53


def parsed(name: str, text: str) -> Any:
    """A value as settings are written."""
    kind = duration if name.endswith("_ms") else size if "bytes" in name else count
    spec = POLICY_SPECS.get(name) or kind(0, MANY, "")
    return parse_setting(Setting(name, "", spec, 0), text, "TUNING")


def split(settings: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Flags for what is a setting, and the environment for the rest."""
    known = {each.name: each.flag for each in config.SETTINGS}
    flags = [f"{known[name]}={value}" for name, value in settings.items() if name in known]
    rest = {name: value for name, value in settings.items() if name not in known}
    return flags, {"TUNING": json.dumps(rest)} if rest else {}


def main() -> None:
    values = {name: parsed(name, text) for name, text in json.loads(os.environ.get("TUNING", "{}")).items()}
    vars(cli)["load_config"] = lambda *sources: changed(config.load_config(*sources), **values)
    cli.main()


if __name__ == "__main__":
    main()
