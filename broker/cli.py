"""postdate-broker: serve a data directory, or look at one without a server."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import click

from broker.config import SETTINGS, BrokerConfig, load_config
from broker.errors import Corrupt, Fenced, PostdateError
from broker.observe.logs import configure_logging
from broker.runtime.vfs import LocalVfs
from broker.settings import ConfigError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="postdate")
def main() -> None:
    """Postdate: a durable broker for messages that must not be delivered before their time."""


def _with_settings(command: Callable[..., Any]) -> Callable[..., Any]:
    for setting in reversed(SETTINGS):
        text = f"{setting.spec.help} [{setting.variable}; default {setting.default}]"
        command = click.option(setting.flag, setting.name, help=text, metavar=setting.spec.kind.value)(
            command
        )
    return command


@main.command()
@click.option("--config", "config_path", help="TOML file with settings.", metavar="file")
@_with_settings
def serve(config_path: str | None, **flags: str | None) -> None:
    """Run the broker until SIGTERM or SIGINT."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        config = load_config(given, os.environ, config_path)
        configure_logging(config.log_format, config.log_level)
        status = _run(config)
    except (ConfigError, Fenced, Corrupt) as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"The broker cannot use its files: {error}") from error
    sys.exit(status)


def _run(config: BrokerConfig) -> int:
    # gRPC's own messages about a port that is taken come on top of ours; whoever wants them sets the variable.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    import uvloop  # noqa: PLC0415 - only a serving broker needs it, and gRPC's server beside it

    from broker.server import Server  # noqa: PLC0415

    async def serve_until_stopped() -> int:
        return await Server(config).run()

    # Before any thread begins, for all of them: a file or network thread that wakes must not push the event loop off
    # its core, which costs two context switches for each read, write and sync. On a free core nothing changes.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    return uvloop.run(serve_until_stopped())


@main.command()
@click.argument("path")
def dump(path: str) -> None:
    """Print any file of a data directory as JSON lines; a damaged one ends in a line "error" and exit code 1."""
    from broker.storage.dump import dump_file  # noqa: PLC0415

    error = ""
    try:
        for line in dump_file(LocalVfs(), path):
            click.echo(json.dumps(line))
            error = line["message"] if line["line"] == "error" else ""
    except BrokenPipeError:
        raise  # whoever reads has seen enough
    except OSError as unreadable:
        raise click.ClickException(f"The file cannot be read: {unreadable}") from unreadable
    if error:
        raise click.ClickException(error)


@main.command()
@click.argument("data_dir", default="./data")
@click.option("--output", type=click.Choice(["text", "json"]), default="text", show_default=True)
def verify(data_dir: str, output: str) -> None:
    """Check every file of a stopped broker's data directory: manifests, journal, ledgers, cursors.

    Exit code 0: all is well; 2: there are problems; 1: the check could not be made.
    """
    from broker.topics.verify import verify_data_dir  # noqa: PLC0415

    try:
        report = verify_data_dir(LocalVfs(), data_dir)
    except PostdateError as error:
        raise click.ClickException(error.message) from error
    except OSError as error:
        raise click.ClickException(f"The data directory cannot be read: {error}") from error
    if output == "json":
        click.echo(json.dumps(asdict(report)))
    else:
        for problem in report.problems:
            click.echo(f"problem: {problem}")
        for note in report.notes:
            click.echo(f"note: {note}")
        click.echo(report.summary)
    sys.exit(2 if report.problems else 0)


if __name__ == "__main__":
    main()
