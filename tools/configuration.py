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

A changed setting takes effect at the next start, except `log_level`, which SIGHUP changes. The files of certificates,
tokens, keys and access rules are read again within 5 seconds of a change, and at once on SIGHUP. On SIGHUP the broker
also logs the names of other settings that have changed. If a value or a file cannot be used, the broker logs an error
and keeps the previous one; SIGHUP never ends a broker ([decision 20](decisions/0020-sighup-never-ends-a-broker.md)).

Spans are configured by the standard `OTEL_*` variables of OpenTelemetry, not by settings
([operations.md](operations.md#spans)).

No setting holds a secret: settings name the files that do, because every user of a machine can read command lines.

A size is a number of bytes, or has a unit: B, KiB, MiB, GiB, kB, MB, GB. A duration is a number of milliseconds, or
has a unit: ms, s, m, h, d. A switch is true or false. The broker refuses to start with an unknown key or an unknown
`POSTDATE_*` variable, except those of the client command: `POSTDATE_ADDRESS`, `POSTDATE_CONTEXT`, `POSTDATE_OUTPUT`,
`POSTDATE_TOKEN`, `POSTDATE_TOKEN_FILE`, `POSTDATE_ALLOW_PLAINTEXT_TOKEN`, and `POSTDATE_TLS` with `POSTDATE_TLS_CA` and
the other `POSTDATE_TLS_*` variables of that command. Kubernetes sets such variables for a service named `postdate`: set
`enableServiceLinks: false` on the pod.

`lease_ms` must not exceed `lease_ms_max`, and `initial_backoff_ms` must not exceed `max_backoff_ms`.
[security.md](security.md) describes which security settings require each other. The maximum size of a request
(16 MiB) and of a frame sent to a client (3.5 MiB) grow with `payload_bytes_max`.

A policy of a topic or subscription ([cli-reference.md](cli-reference.md)) inherits the setting of the same name. The
last table has the policies without a setting, such as the tracker or the size of a ledger, and their defaults.
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
    if spec.kind is SettingKind.DURATION and spec.high >= DURATION_MS_MAX:
        allowed = f"{show(spec.kind, spec.low)} or more"
    elif spec.high:
        allowed = f"{show(spec.kind, spec.low)} to {show(spec.kind, spec.high)}"
    else:
        allowed = ", ".join(spec.choices) or spec.kind.value
    shown = "" if default is None else show(spec.kind, default)
    return f"| `{name}` | {f'`{shown}`' if shown else 'not set'} | {allowed} | {spec.help} |"


if __name__ == "__main__":
    print(render_reference(), end="")
