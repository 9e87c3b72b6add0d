"""The `postdate` command.

Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 unreachable, 5 partly, 6 check failed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import click

from postdate.commands import (
    admin,
    bench,
    check,
    completion,
    consume,
    contexts,
    dlq,
    export,
    importing,
    outbox,
    produce,
    recurring,
    replay,
    schedule,
    tail,
)
from postdate.commands.config_file import ContextError
from postdate.commands.output import plain
from postdate.commands.settings import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_NOT_FOUND,
    CommandFailed,
    CommandGroup,
    Settings,
    describe,
    exit_code,
    shared_options,
)
from postdate.errors import PostdateError


def _version() -> str:
    try:
        return version("postdate")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


@click.group(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    params=shared_options(),
)
@click.version_option(_version(), prog_name="postdate")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Send, schedule and receive messages of a Postdate broker, and manage its topics."""
    ctx.ensure_object(Settings)


cli.add_command(produce.produce)
cli.add_command(consume.consume)
cli.add_command(tail.tail)
cli.add_command(admin.topic)
cli.add_command(admin.subscription)
cli.add_command(schedule.schedule)
cli.add_command(recurring.recurring)
cli.add_command(dlq.dlq)
cli.add_command(outbox.outbox)
cli.add_command(export.export)
cli.add_command(importing.import_)
cli.add_command(admin.stats)
cli.add_command(admin.info)
cli.add_command(check.check)
bench.bench.add_command(replay.replay)
cli.add_command(bench.bench)
cli.add_command(contexts.context)
cli.add_command(completion.completion)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    logging.getLogger("postdate").addHandler(logging.NullHandler())
    try:
        result = cli.main(arguments, prog_name="postdate", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except CommandFailed as error:
        return _say(error.message, error.code)
    except ContextError as error:
        return _say(str(error), EXIT_NOT_FOUND if error.is_unknown else EXIT_FAILED)
    except PostdateError as error:
        return _say(describe(error), exit_code(error))
    except BrokenPipeError:
        # Whoever read our output has enough. Python would complain once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        why = error.strerror or str(error)
        return _say(f"{why}: {error.filename}" if error.filename is not None else why, 1)
    except ValueError as error:
        return _say(str(error), 1)
    except (KeyboardInterrupt, click.Abort):
        return _say("interrupted", EXIT_INTERRUPTED)
    return result if isinstance(result, int) else 0


def main() -> None:
    """The entry point."""
    sys.exit(run())


def _say(message: str, code: int) -> int:
    click.echo(f"postdate: {plain(message)}", err=True)
    return code


if __name__ == "__main__":
    main()
