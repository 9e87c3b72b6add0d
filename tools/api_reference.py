"""The API reference, docs/api.md, from the protos' descriptors and comments; `make protos` writes it.

python tools/api_reference.py postdate.binpb docs/api.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

PACKAGE = "postdate.v1"
# In the order in which a newcomer needs them.
SERVICES = ("ProducerService", "ConsumerService", "ScheduleService", "AdminService", "CompactionService")
INTRODUCTION = """\
# API reference

<!-- Written by `make protos` from the comments in protos/postdate/v1; a test compares the two. -->

Every call and every field of package `postdate.v1`, generated from [the protos](../protos/postdate/v1), which are the
contract.

- Times are milliseconds since the Unix epoch in UTC, on the broker's clock, and end in `_at_ms` or `_time_ms`.
  Durations are milliseconds and end in `_ms`. 0 is unset, unless a field is marked *optional*: that one tells unset
  from 0.
- Errors carry a status code and a reason; [errors.md](errors.md) has all of them and what to do about each.
- Names of topics and subscriptions are `[A-Za-z0-9][A-Za-z0-9._~-]{0,254}`.
- Limits that are called defaults here are settings: [configuration.md](configuration.md).

How to call it from Go, Java, Node or a shell: [other-languages.md](other-languages.md). What the calls promise:
[guarantees.md](guarantees.md).
"""
SCALARS = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in FieldDescriptorProto.Type.items()
    if name not in {"TYPE_MESSAGE", "TYPE_ENUM", "TYPE_GROUP"}
}

Path_ = tuple[int, ...]  # where a declaration stands in its file, as descriptors name it


@dataclass
class Api:
    """Declarations of the files by name; comments by the full name of what they are on."""

    messages: dict[str, DescriptorProto] = field(default_factory=dict)
    enums: dict[str, EnumDescriptorProto] = field(default_factory=dict)
    methods: dict[str, list[MethodDescriptorProto]] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)

    def comment(self, *names: str) -> str:
        return self.comments[".".join(names)]


def main() -> None:
    source, target = map(Path, sys.argv[1:])
    files = FileDescriptorSet.FromString(source.read_bytes()).file
    target.write_text(reference(read_api([each for each in files if each.package == PACKAGE])))


def read_api(files: Sequence[FileDescriptorProto]) -> Api:
    api = Api()
    for each in files:
        comments = {
            tuple(location.path): prose(location.leading_comments)
            for location in each.source_code_info.location
        }
        for name, path in declared(each):
            api.comments[name] = comments.get(path, "")
        api.messages.update({message.name: message for message in each.message_type})
        api.enums.update({enum.name: enum for enum in each.enum_type})
        api.methods.update({service.name: list(service.method) for service in each.service})
    if silent := sorted(name for name, comment in api.comments.items() if not comment):
        sys.exit(f"these have no comment in the protos: {', '.join(silent)}")
    return api


def declared(file: FileDescriptorProto) -> Iterator[tuple[str, Path_]]:
    """Everything in a file that has a comment: its name, and its path by the numbers of descriptor.proto."""
    for index, message in enumerate(file.message_type):
        yield message.name, (4, index)
        for place, each in enumerate(message.field):
            yield f"{message.name}.{each.name}", (4, index, 2, place)
    for index, enum in enumerate(file.enum_type):
        yield enum.name, (5, index)
        for place, value in enumerate(enum.value):
            yield f"{enum.name}.{value.name}", (5, index, 2, place)
    for index, service in enumerate(file.service):
        yield service.name, (6, index)
        for place, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", (6, index, 2, place)


def prose(comment: str) -> str:
    """A comment as one line of Markdown."""
    lines = [line.strip() for line in comment.splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith("buf:lint:"))
    pieces = text.split("`")  # every second one is code already
    for index in range(0, len(pieces), 2):
        escaped = pieces[index].replace("<", "&lt;").replace("|", "\\|")
        pieces[index] = re.sub(r"\b[A-Za-z0-9]+(?:\.[a-z]+)?(?:_[A-Za-z0-9]+)+\b", r"`\g<0>`", escaped)
    return "`".join(pieces)


def reference(api: Api) -> str:
    assert set(api.methods) == set(SERVICES), "a service is missing from SERVICES"
    shown: set[str] = set()
    parts = [INTRODUCTION]
    for service in SERVICES:
        parts += [f"## {service}", api.comment(service), calls(api, service)]
        for method in api.methods[service]:
            parts += call(api, service, method, shown)
    parts += ["## Types", "What the calls share, by name."]
    for name in sorted((api.messages.keys() | api.enums.keys()) - shown):
        parts += [f"### {name}", api.comment(name)]
        parts.append(fields(api, name) if name in api.messages else values(api, name))
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def calls(api: Api, service: str) -> str:
    """The service's calls, each with the first sentence of its comment."""
    rows = [
        (link(f"{service}.{each.name}", each.name), first_sentence(api.comment(service, each.name)))
        for each in api.methods[service]
    ]
    return table(("call", ""), rows)


def call(api: Api, service: str, method: MethodDescriptorProto, shown: set[str]) -> list[str]:
    parts = [f"### {service}.{method.name}", api.comment(service, method.name)]
    for word, type_name, streams in (
        ("Request", method.input_type, method.client_streaming),
        ("Answer", method.output_type, method.server_streaming),
    ):
        name = type_name.removeprefix(f".{PACKAGE}.")
        many = "stream of " if streams else ""
        if name in shown:
            parts.append(f"**{word}:** {many}{link(name)}")
            continue
        # What only one call uses stands with it; its anchor is for those who link to the message.
        shown.add(name)
        parts.append(f'<a id="{name.lower()}"></a>**{word}:** {many}`{name}`. {api.comment(name)}')
        parts.append(fields(api, name))
    return parts


def fields(api: Api, name: str) -> str:
    message = api.messages[name]
    if not message.field:
        return "It has no fields."
    rows = [
        (f"`{each.name}`", kind(message, each), api.comment(name, each.name) + alternative(message, each))
        for each in message.field
    ]
    return table(("field", "type", "meaning"), rows)


def alternative(message: DescriptorProto, each: FieldDescriptorProto) -> str:
    """Of a member of a oneof: that it excludes the others."""
    if not each.HasField("oneof_index") or each.proto3_optional:
        return ""
    return f" *(one of `{message.oneof_decl[each.oneof_index].name}`)*"


def kind(message: DescriptorProto, each: FieldDescriptorProto) -> str:
    for nested in message.nested_type:
        if nested.options.map_entry and each.type_name.endswith(f".{message.name}.{nested.name}"):
            key, value = (kind(nested, item) for item in nested.field)
            return f"map of {key} to {value}"
    if each.type in SCALARS:
        name = SCALARS[each.type]
    elif each.type_name.startswith(f".{PACKAGE}."):
        name = link(each.type_name.removeprefix(f".{PACKAGE}."))
    else:
        name = f"`{each.type_name.removeprefix('.')}`"
    if each.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"*optional* {name}" if each.proto3_optional else name


def values(api: Api, name: str) -> str:
    rows = [
        (f"`{value.name}`", str(value.number), api.comment(name, value.name))
        for value in api.enums[name].value
    ]
    return table(("value", "number", "meaning"), rows)


def link(name: str, text: str = "") -> str:
    """A link to a heading of the page: its anchor is the heading in lower case, without dots."""
    return f"[{text or name}](#{name.lower().replace('.', '')})"


def first_sentence(text: str) -> str:
    return re.split(r"(?<=\.) ", text, maxsplit=1)[0]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    main()
