"""`postdate context`: brokers by name, kept in a file of the user."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import click

from postdate.commands.config_file import CONNECTION, Contexts
from postdate.commands.output import emit_one, emit_rows, plain
from postdate.commands.settings import (
    EXIT_FAILED,
    CommandFailed,
    CommandGroup,
    Settings,
    complete_context,
    missing,
)
from postdate.credentials import split_addresses

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@click.group(cls=CommandGroup)
def context() -> None:
    """Name brokers, and select the one that commands use."""


@context.command("add")
@click.argument("name")
@click.option("--use", is_flag=True, help="Make it the current context.")
@click.option("--force", is_flag=True, help="Replace an existing context of this name.")
@click.pass_obj
def add_context(settings: Settings, name: str, use: bool, force: bool) -> None:
    """Save the connection options given here, such as --address, under NAME.

    The context contains the paths of files, not their contents, and therefore no secrets.
    """
    if not _NAME.fullmatch(name):
        raise click.UsageError(
            "a name consists of letters, digits, '.', '_' and '-', and begins with a letter or a digit"
        )
    contexts = Contexts.read()
    if name in contexts.by_name and not force:
        raise CommandFailed(f"there is a context {name} already; --force replaces it", EXIT_FAILED)
    values = {key: getattr(settings, key) for key in CONNECTION if settings.given.get(key) == "option"}
    if "address" not in values:
        raise click.UsageError("say where the broker is: --address HOST:PORT")
    try:
        split_addresses(values["address"])
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    for key, value in values.items():
        if CONNECTION[key] == "file":
            # Relative paths would mean another file in another folder.
            values[key] = str(Path(value).expanduser().absolute())
            if not os.access(values[key], os.R_OK):
                click.echo(f"postdate: warning: {key}: {plain(missing(values[key]))}", err=True)
    contexts.by_name[name] = values
    if use:
        contexts.current = name
    contexts.write()
    _show(settings, _row(contexts, name))


@context.command("use")
@click.argument("name", shell_complete=complete_context)
@click.pass_obj
def use_context(settings: Settings, name: str) -> None:
    """Make NAME the current context."""
    contexts = Contexts.read()
    contexts.get(name)
    contexts.current = name
    contexts.write()
    _show(settings, _row(contexts, name))


@context.command("list")
@click.pass_obj
def list_contexts(settings: Settings) -> None:
    """List all contexts."""
    contexts = Contexts.read()
    rows = [_row(contexts, name) for name in sorted(contexts.by_name)]
    emit_rows(settings, rows, ["name", "current", "address"])


@context.command("show")
@click.argument("name", required=False, shell_complete=complete_context)
@click.pass_obj
def show_context(settings: Settings, name: str | None) -> None:
    """Show context NAME, or the connection that the next command would use."""
    if name is not None:
        _show(settings, _row(Contexts.read(), name))
        return
    chosen = settings.apply_context()
    values = {key: getattr(settings, key, None) for key in CONNECTION}
    _show(settings, {"context": chosen or None} | values)


@context.command("remove")
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_context)
def remove_contexts(names: tuple[str, ...]) -> None:
    """Remove contexts. The brokers are not affected."""
    contexts = Contexts.read()
    for name in names:
        contexts.get(name)
    for name in names:
        contexts.by_name.pop(name, None)
        if contexts.current == name:
            contexts.current = ""
    contexts.write()


def _show(settings: Settings, fields: dict[str, Any]) -> None:
    if settings.output == "table":  # most of it is not set
        fields = {
            key: value
            for key, value in fields.items()
            if value not in {None, False} or key in {"context", "current"}
        }
    emit_one(settings, fields)


def _row(contexts: Contexts, name: str) -> dict[str, Any]:
    values = contexts.get(name)
    return {"name": name, "current": name == contexts.current} | {key: values.get(key) for key in CONNECTION}
