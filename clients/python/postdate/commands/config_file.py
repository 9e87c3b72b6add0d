"""The file of contexts: brokers by name.

current = "prod"

[contexts.prod]
address = "broker.example:7650"
tls_ca = "/etc/postdate/ca.pem"
token_file = "/home/me/.postdate-token"
"""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

CONNECTION = {
    "address": "text",
    "tls": "bool",
    "tls_ca": "file",
    "tls_cert": "file",
    "tls_key": "file",
    "tls_server_name": "text",
    "token_file": "file",
    "allow_plaintext_token": "bool",
}
"""The settings that say which broker and how to reach it, which a context keeps; each is text, a file or a bool."""


class ContextError(Exception):
    """The file cannot be read, or has no such context."""

    def __init__(self, message: str, *, is_unknown: bool = False) -> None:
        super().__init__(message)
        self.is_unknown = is_unknown


def config_path() -> Path:
    """The path of the file: `~/.config/postdate/config.toml`, or under XDG_CONFIG_HOME."""
    return Path(click.get_app_dir("postdate")) / "config.toml"


@dataclass
class Contexts:
    """The content of the file."""

    current: str = ""
    by_name: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Contexts:
        """The file; nothing if there is none."""
        path = config_path()
        try:
            document = tomllib.loads(path.read_text())
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError) as error:
            raise ContextError(f"cannot read {path}: {error}") from None
        contexts, current = document.get("contexts", {}), document.get("current", "")
        if not isinstance(contexts, dict) or not isinstance(current, str):
            raise ContextError(f"cannot read {path}: contexts are tables, [contexts.NAME]; current is a name")
        for name, values in contexts.items():
            if not isinstance(values, dict) or not _is_known(values):
                known = ", ".join(CONNECTION)
                raise ContextError(f"cannot read {path}: a context has {known}; look at {name}")
        return cls(current, contexts)

    def get(self, name: str) -> dict[str, Any]:
        if name not in self.by_name:
            raise ContextError(
                f"there is no context {name}; postdate context list shows them", is_unknown=True
            )
        return self.by_name[name]

    def write(self) -> None:
        """Replace the file in one step, readable by its user only."""
        path = config_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)  # mode 0600
        try:
            with open(descriptor, "w") as file:
                file.write(self._text())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    def _text(self) -> str:
        # A string of JSON is one of TOML, except that TOML wants DEL escaped too.
        def quoted(value: Any) -> str:
            return json.dumps(value).replace("\x7f", "\\u007f")

        lines = [f"current = {quoted(self.current)}"] if self.current else []
        for name, values in sorted(self.by_name.items()):
            lines += ["", f"[contexts.{quoted(name)}]"]
            lines += [f"{key} = {quoted(value)}" for key, value in values.items()]
        return "\n".join(lines).lstrip("\n") + "\n"


def _is_known(values: dict[str, Any]) -> bool:
    kinds = {name: bool if kind == "bool" else str for name, kind in CONNECTION.items()}
    return all(name in kinds and isinstance(value, kinds[name]) for name, value in values.items())
