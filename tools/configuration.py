"""Writes docs/configuration.md from the settings: `python -m tools.configuration > docs/configuration.md`."""

from __future__ import annotations

from broker.config import SETTINGS
from broker.settings import SettingKind, show

_PREFACE = """\
# Configuration

<!-- Written by `python -m tools.configuration > docs/configuration.md`; a test compares the two. -->

Every setting has one name and four sources, from lowest to highest: the default below, the TOML file named by
`--config`, the environment, and flags.

```
data_dir = "/var/lib/postdate"            # postdate.toml: flat, no tables
POSTDATE_DATA_DIR=/var/lib/postdate       # environment
postdate-broker serve --data-dir /var/lib/postdate
```

A secret has no flag, for every user of a machine can read command lines.

Sizes are bytes or carry a unit: B, KiB, MiB, GiB, kB, MB, GB. Durations are milliseconds or carry a unit:
ms, s, m, h, d. Switches are true or false. Unknown keys and other `POSTDATE_*` variables are refused, except
those of the client command: `POSTDATE_ADDRESS`, `POSTDATE_CONTEXT`, `POSTDATE_OUTPUT`, `POSTDATE_TOKEN`,
`POSTDATE_TOKEN_FILE`, `POSTDATE_TLS`, `POSTDATE_TLS_CA` and its like. (Kubernetes invents such variables for a
service named `postdate`: set `enableServiceLinks: false` on the pod.)

Some settings must fit together, and are refused if they do not: the greatest message into a request and into
a frame; a request into a journal file, the pending journal and a ledger; a batch into a ledger; what one
dispatcher step reads (`read_batch_entries`) into one acknowledgement (`ack_entries_max`), and the failures
of a whole acknowledgement, 192 bytes each, into a frame; `lease_ms` into `lease_ms_max`;
`initial_backoff_ms` into `max_backoff_ms`. What the settings of security need of each other is in
[security.md](security.md).
"""


def render_reference() -> str:
    """The text of docs/configuration.md."""
    lines = [_PREFACE]
    group = ""
    for setting in SETTINGS:
        spec = setting.spec
        if setting.group != group:
            group = setting.group
            lines += [
                f"\n## {group}\n",
                "| setting | default | range | meaning |",
                "| --- | --- | --- | --- |",
            ]
        if spec.kind is SettingKind.SECRET:
            allowed = f"{spec.low:.0f} characters or more"
        elif spec.high:
            allowed = f"{show(spec.kind, spec.low)} to {show(spec.kind, spec.high)}"
        else:
            allowed = ", ".join(spec.choices) or spec.kind.value
        default = show(spec.kind, setting.default)
        shown = f"`{default}`" if default else "not set"
        lines.append(f"| `{setting.name}` | {shown} | {allowed} | {spec.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render_reference(), end="")
