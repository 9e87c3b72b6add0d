"""Writes docs/configuration.md from the settings: `python -m tools.configuration > docs/configuration.md`."""

from __future__ import annotations

from dataclasses import fields

from broker.config import SETTINGS
from broker.policy import SubscriptionPolicy, TopicPolicy
from broker.settings import DURATION_MS_MAX, SettingKind, Spec, Value, show

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

A changed setting takes effect at the next start. Only `log_level` is reread on SIGHUP, and with it the files of
certificates, tokens, keys and access rules; the log names other settings that have changed. What cannot be used
stays as it was, with an error in the log; SIGHUP never ends a broker
([decision 20](decisions/0020-sighup-never-ends-a-broker.md)).

Secrets have no flag, because every user of a machine can read command lines.

Sizes are bytes or carry a unit: B, KiB, MiB, GiB, kB, MB, GB. Durations are milliseconds or carry a unit:
ms, s, m, h, d. Switches are true or false. Unknown keys and other `POSTDATE_*` variables are refused, except
those of the client command: `POSTDATE_ADDRESS`, `POSTDATE_CONTEXT`, `POSTDATE_OUTPUT`, `POSTDATE_TOKEN`,
`POSTDATE_TOKEN_FILE`, `POSTDATE_TLS`, `POSTDATE_TLS_CA` and its like. (Kubernetes invents such variables for a
service named `postdate`: set `enableServiceLinks: false` on the pod.)

Some settings must fit together, and are refused if they do not: `lease_ms` into `lease_ms_max`, and
`initial_backoff_ms` into `max_backoff_ms`. What the settings of security need of each other is in
[security.md](security.md). The limits of a request
(16 MiB) and of a frame sent (3.5 MiB) grow with `payload_bytes_max`.

Policies of topics and subscriptions ([cli-reference.md](cli-reference.md)) inherit the settings of the same name. Those
without a setting, such as the tracker or the size of a ledger, have the defaults in the last table.
"""


def render_reference() -> str:
    """The text of docs/configuration.md."""
    lines = [_PREFACE]
    group = ""
    for setting in SETTINGS:
        if setting.group != group:
            group = setting.group
            lines += [
                f"\n## {group}\n",
                "| setting | default | range | meaning |",
                "| --- | --- | --- | --- |",
            ]
        lines.append(_row(setting.name, setting.spec, setting.default))
    lines += ["\n## Policies without a setting\n"]
    lines += ["| policy | default | range | meaning |", "| --- | --- | --- | --- |"]
    known = {setting.name for setting in SETTINGS}
    lines += [
        _row(each.name, each.metadata["spec"], each.metadata["default"])
        for kind in (TopicPolicy, SubscriptionPolicy)
        for each in fields(kind)
        if each.name not in known
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, spec: Spec, default: Value | None) -> str:
    if spec.kind is SettingKind.SECRET:
        allowed = f"{spec.low:.0f} characters or more"
    elif spec.kind is SettingKind.DURATION and spec.high >= DURATION_MS_MAX:
        allowed = f"{show(spec.kind, spec.low)} or more"
    elif spec.high:
        allowed = f"{show(spec.kind, spec.low)} to {show(spec.kind, spec.high)}"
    else:
        allowed = ", ".join(spec.choices) or spec.kind.value
    shown = "" if default is None else show(spec.kind, default)
    return f"| `{name}` | {f'`{shown}`' if shown else 'not set'} | {allowed} | {spec.help} |"


if __name__ == "__main__":
    print(render_reference(), end="")
