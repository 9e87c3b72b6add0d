"""Writes the policies of the SDK and of the command `postdate` from the schema: `python -m tools.policies`.

The schema is `broker/policy.py`. The SDK does not import the broker, so its classes and the options of its command are
source files made from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from textwrap import fill

from broker.policy import POLICY_SPECS, SubscriptionPolicy, TopicPolicy
from broker.settings import SettingKind, Spec
from postdate_api.v1 import admin_pb2

SDK = Path(__file__).parent.parent / "clients" / "python" / "postdate"
WIDTH = 108

TYPES = {
    SettingKind.COUNT: "int",
    SettingKind.DURATION: "timedelta",
    SettingKind.FACTOR: "float",
    SettingKind.NAME: "str",
    SettingKind.SIZE: "int",
    SettingKind.SWITCH: "bool",
}
"""Types in the SDK; a choice has an Enum of its own."""

TOPIC = [field.name for field in fields(TopicPolicy)]
SUBSCRIPTION = [field.name for field in fields(SubscriptionPolicy)]
OF_BUCKETS = set(admin_pb2.BucketPolicy.DESCRIPTOR.fields_by_name)
BUCKETS = [name for name in TOPIC if name in OF_BUCKETS]
OF_TOPIC = [name for name in TOPIC if name not in OF_BUCKETS]

CLASSES_HEAD = '''\
"""Settings of topics and subscriptions. Written by `python -m tools.policies`; a test compares the two.

Three things can be said of each: leave it out of an update, and it stays; None, and the broker's own holds
(again); a value, and that holds, where zero means that there is none: no limit, no expiry, not at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import TypedDict
'''
OPTIONS_HEAD = '''\
"""Options for policies. Written by `python -m tools.policies`; a test compares the two."""

from __future__ import annotations

from typing import NamedTuple


class PolicyOption(NamedTuple):
    """An option of `topic` and `subscription`: field of the policy, kind of value, least value, help."""

    name: str
    kind: str
    least: float
    help: str
'''
BUCKET_DOC = "Settings of the bucket tracker: how it seals, merges and cuts. None inherits the broker's."
TOPIC_DOC = "A topic's settings. None inherits the broker's; zero means none."
SUBSCRIPTION_DOC = "A subscription's settings. None inherits the broker's; zero means none."


def render_classes() -> str:
    """The text of postdate/policies.py."""
    of_topic = [*members(OF_TOPIC), ("buckets", "BucketPolicy", "Settings of the bucket tracker.")]
    of_subscription = list(members(SUBSCRIPTION))
    blocks = [
        CLASSES_HEAD,
        *(enum_of(name, POLICY_SPECS[name]) for name in TOPIC if POLICY_SPECS[name].choices),
        policy_of("BucketPolicy", BUCKET_DOC, members(BUCKETS)),
        policy_of("TopicPolicy", TOPIC_DOC, of_topic),
        policy_of("SubscriptionPolicy", SUBSCRIPTION_DOC, of_subscription),
        changes_of("Topic", of_topic),
        changes_of("Subscription", of_subscription),
    ]
    return "\n\n".join(blocks)


def render_options() -> str:
    """The text of postdate/commands/policy_options.py."""
    groups = {"BUCKET_OPTIONS": BUCKETS, "TOPIC_OPTIONS": OF_TOPIC, "SUBSCRIPTION_OPTIONS": SUBSCRIPTION}
    return OPTIONS_HEAD + "\n\n" + "".join(options_of(name, names) for name, names in groups.items())


def members(names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Name, type and help of each field in the SDK."""
    for name in names:
        spec = POLICY_SPECS[name]
        kind = class_name(name) if spec.choices else TYPES[spec.kind]
        yield name.removesuffix("_ms"), kind, spec.help


def class_name(name: str) -> str:
    return name.title().replace("_", "")


def enum_of(name: str, spec: Spec) -> str:
    lines = [f"class {class_name(name)}(Enum):", f'    """{spec.help}"""', ""]
    lines += [f"    {choice.upper()} = {spec.number(choice)}" for choice in spec.choices]
    return "\n".join(lines) + "\n"


def policy_of(name: str, doc: str, listed: Iterable[tuple[str, str, str]]) -> str:
    lines = ["@dataclass(frozen=True, slots=True)", f"class {name}:", f'    """{doc}"""', ""]
    for field, kind, text in listed:
        lines += [f"    {field}: {kind} | None = None", docstring(text)]
    return "\n".join(lines) + "\n"


def docstring(text: str) -> str:
    return fill(f'"""{text}"""', WIDTH, initial_indent="    ", subsequent_indent="    ")


def changes_of(name: str, listed: Iterable[tuple[str, str, str]]) -> str:
    doc = f"Arguments of `{name}s.update`: the fields of `{name}Policy`."
    lines = [f"class {name}Changes(TypedDict, total=False):", f'    """{doc}"""', ""]
    lines += [f"    {field}: {kind} | None" for field, kind, _ in listed]
    return "\n".join(lines) + "\n"


def options_of(name: str, names: Iterable[str]) -> str:
    lines = [f"{name} = ("]
    for field in names:
        spec = POLICY_SPECS[field]
        shown = (field.removesuffix("_ms"), spec.kind.name.lower(), spec.low, spec.help)
        line = f"    PolicyOption({', '.join(map(quoted, shown))}),"
        lines += [line] if len(line) <= WIDTH + 2 else wrapped(shown)
    return "\n".join([*lines, ")\n"])


def wrapped(shown: Iterable[object]) -> list[str]:
    return ["    PolicyOption(", *(f"        {quoted(part)}," for part in shown), "    ),"]


def quoted(part: object) -> str:
    return f'"{part}"' if isinstance(part, str) else str(part)


FILES = {
    SDK / "policies.py": render_classes,
    SDK / "commands" / "policy_options.py": render_options,
}

if __name__ == "__main__":
    for path, render in FILES.items():
        path.write_text(render())
