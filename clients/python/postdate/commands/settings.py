"""What every subcommand shares: where the broker is, how to print, what an error is worth."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import click

import postdate
from postdate.commands.values import DURATION

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_UNREACHABLE = 4
EXIT_PARTLY = 5
EXIT_CHECK_FAILED = 6
EXIT_INTERRUPTED = 130

ResultT = TypeVar("ResultT")


@dataclass
class Settings:
    """The global options."""

    address: str = postdate.DEFAULT_ADDRESS
    output: str = "table"
    progress: bool | None = None
    retry_for: timedelta = timedelta(seconds=5)

    def client(self) -> postdate.Client:
        return postdate.connect(self.address, retry_for=self.retry_for)


class CommandFailed(Exception):
    """Ends the command with one line on stderr and this exit code."""

    def __init__(self, message: str, code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def exit_code(error: postdate.PostdateError) -> int:
    """What a failure of the broker, or of the way to it, means to a script."""
    if isinstance(error, postdate.NotFound):
        return EXIT_NOT_FOUND
    if isinstance(error, postdate.Unavailable | postdate.Disconnected | postdate.DeadlineExceeded):
        return EXIT_UNREACHABLE
    if isinstance(error, postdate.PartlyStored | postdate.PartlyChanged):
        return EXIT_PARTLY
    return EXIT_FAILED


def describe(error: postdate.PostdateError) -> str:
    """One line."""
    text = " ".join(error.message.split())
    if isinstance(error, postdate.Unavailable) and not error.reason:
        text = f"the broker cannot be reached: {text}"
    facts = [fact for fact in (error.field, error.reason) if fact]
    return f"{text} ({', '.join(facts)})" if facts else text


def run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a subcommand's coroutine."""
    return asyncio.run(work)


def _keep(name: str) -> Any:
    def callback(ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
        if value is not None:
            setattr(ctx.ensure_object(Settings), name, value)
        return value

    return callback


def shared_options() -> list[click.Option]:
    """The global options, which may also stand after the subcommand."""
    return [
        click.Option(
            ["--address"],
            envvar="POSTDATE_ADDRESS",
            expose_value=False,
            callback=_keep("address"),
            help=f"Where the broker is, host:port.  [default: {postdate.DEFAULT_ADDRESS}]",
        ),
        click.Option(
            ["--output", "-o"],
            type=click.Choice(["table", "json", "jsonl"]),
            expose_value=False,
            callback=_keep("output"),
            help="How to print results.  [default: table]",
        ),
        click.Option(
            ["--progress/--no-progress"],
            default=None,
            expose_value=False,
            callback=_keep("progress"),
            help="Show progress on stderr.  [default: on a terminal]",
        ),
        click.Option(
            ["--retry-for"],
            type=DURATION,
            expose_value=False,
            callback=_keep("retry_for"),
            help="How long to wait for a broker that is away.  [default: 5s]",
        ),
    ]


class Command(click.Command):
    """A subcommand that takes the global options too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for option in shared_options():
            # An environment variable speaks once, on the outside, or it would undo a flag given there.
            option.envvar = None
            option.hidden = True
            self.params.append(option)


class Group(click.Group):
    """A group whose members take the global options too."""

    command_class = Command
    group_class = type
