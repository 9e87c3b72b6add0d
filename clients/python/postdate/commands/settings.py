"""Settings that every subcommand shares: where the broker is, how to print, what an error is worth."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

import postdate
from postdate.commands.config_file import ContextError, Contexts
from postdate.commands.values import DURATION
from postdate.credentials import Credentials, Token

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
EXIT_UNREACHABLE = 4
EXIT_PARTLY = 5
EXIT_CHECK_FAILED = 6
EXIT_INTERRUPTED = 130

_GRPC_PORT = "give the gRPC port, which is 7650 by default"

ResultT = TypeVar("ResultT")


@dataclass
class Settings:
    """The global options."""

    address: str = postdate.DEFAULT_ADDRESS
    output: str = "table"
    progress: bool | None = None
    retry_for: timedelta = timedelta(seconds=5)
    context: str = ""
    given: dict[str, str] = field(default_factory=dict)
    """Return those of these that were given, and where: by an `option` or in the `environment`."""
    uses_contexts: bool = True
    of_context: dict[str, str] = field(default_factory=dict)
    """Settings whose value a context gave, and the name of it."""

    tls: bool = False
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_server_name: str | None = None
    token_file: str | None = None
    allow_plaintext_token: bool = False

    def client(self) -> postdate.Client:
        self.apply_context()
        try:
            return postdate.connect(
                self.address,
                retry_for=self.retry_for,
                tls=self.tls_settings(),
                token=self.token(),
                allow_plaintext_token=self.allow_plaintext_token,
            )
        except ValueError as error:
            raise CommandFailed(_in_options(str(error)), EXIT_USAGE) from error

    def apply_context(self) -> str:
        """Fill in what the chosen context says and nothing stronger does; its name, if there is one.

        From the strongest: options; the context of --context; the environment; the context of POSTDATE_CONTEXT, or
        the current one. An address that is given is a broker of its own: the files and the token of a context that
        nobody named go to that context's broker only.
        """
        if not self.uses_contexts:
            return ""
        is_named = self.given.get("context") == "option"
        if "POSTDATE_TOKEN" in os.environ:
            self.given.setdefault("token_file", "environment")
        if "address" in self.given and not is_named:
            return ""
        contexts = Contexts.read()
        name = self.context or contexts.current
        if name:
            for key, value in contexts.get(name).items():
                source = self.given.get(key)
                if source is None or (source == "environment" and is_named):
                    setattr(self, key, value)
                    self.of_context[key] = name
        return name

    def credentials(self) -> Credentials:
        """The same, for calls that the SDK does not have."""
        try:
            return Credentials(
                self.address,
                tls=self.tls_settings(),
                token=self.token(),
                allow_plaintext_token=self.allow_plaintext_token,
            )
        except ValueError as error:
            raise CommandFailed(_in_options(str(error)), EXIT_USAGE) from error

    def tls_settings(self) -> postdate.Tls | None:
        """The TLS that the --tls options ask for."""
        files = (self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)
        if not self.tls and all(each is None for each in files):
            return None
        return postdate.Tls(
            ca_file=self._file("tls_ca"),
            cert_file=self._file("tls_cert"),
            key_file=self._file("tls_key"),
            server_name=self.tls_server_name,
        )

    def token(self) -> Token | None:
        """The token of the file, read anew for each call; or of the environment. Never of the command line, which
        every user of the machine can read."""
        if (token_file := self._file("token_file")) is not None:
            return Path(token_file).read_text
        return os.environ.get("POSTDATE_TOKEN") or None

    def _file(self, name: str) -> str | None:
        """The path of a file that can be read. Raises CommandFailed, which says who named another one.

        It is not opened: what comes from a pipe, as in --token-file <(...), can be read but once.
        """
        path: str | None = getattr(self, name)
        if path is None or os.access(path, os.R_OK):
            return path
        if name in self.of_context:
            where = f"{name} of context {self.of_context[name]}"
        elif self.given.get(name) == "environment":
            where = f"POSTDATE_{name.upper()}"
        else:
            where = "--" + name.replace("_", "-")
        raise CommandFailed(f"{where}: {missing(path)}")


def missing(path: str) -> str:
    """Say why a file cannot be read."""
    return f"the file {path} " + ("cannot be read" if os.path.lexists(path) else "does not exist")


def _in_options(text: str) -> str:
    """Say in the words of the command line what the SDK says."""
    for ours, theirs in (
        ("tls=postdate.Tls(...)", "--tls or --tls-ca"),
        ("allow_plaintext_token=True", "--allow-plaintext-token"),
        ("both cert_file and key_file", "both --tls-cert and --tls-key"),
    ):
        text = text.replace(ours, theirs)
    return text


class CommandFailed(Exception):
    """Ends the command with one line on stderr and this exit code."""

    def __init__(self, message: str, code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def exit_code(error: postdate.PostdateError) -> int:
    """The exit code of a failure of the broker, or of the way to it."""
    if isinstance(error, postdate.NotFound):
        return EXIT_NOT_FOUND
    if isinstance(
        error, postdate.Unavailable | postdate.TlsFailed | postdate.Disconnected | postdate.DeadlineExceeded
    ):
        return EXIT_UNREACHABLE
    if isinstance(error, postdate.PartlyStored | postdate.PartlyChanged):
        return EXIT_PARTLY
    return EXIT_FAILED


def not_confirmed(done: str, why: str = "") -> CommandFailed:
    """The end of a command that changes by filter, in bulk or with messages pending, and was not told --yes."""
    return CommandFailed(f"{why + ', and ' if why else ''}nothing was {done}; add --yes to go on", EXIT_USAGE)


def describe(error: postdate.PostdateError) -> str:
    """One line."""
    text = " ".join(error.message.split())
    if isinstance(error, postdate.Unavailable) and not error.reason:
        text = f"the broker cannot be reached: {text}"
        if "Socket closed" in text:  # how a port refuses who does not speak TLS, or has no certificate
            text += "; perhaps it wants TLS (--tls-ca) or a client certificate (--tls-cert, --tls-key)"
        elif "http1.x server" in text:  # gRPC's words, behind others of frames and settings
            text = f"the broker cannot be reached: an HTTP server listens at this address; {_GRPC_PORT}"
        elif ":7680" in text:
            text += f"; 7680 is the HTTP port by default, {_GRPC_PORT}"
        elif postdate.DEFAULT_ADDRESS in text:  # where a broker listens that was just installed
            text += "; postdate-broker serve starts one here, --address names another"
    if isinstance(error, postdate.TlsFailed):
        text += (
            "; --tls-ca names the file of who vouches for it, --tls-server-name the name in its certificate"
        )
    if error.reason == "CREDENTIALS_MISSING":
        text += "; give --token-file, or --tls-cert and --tls-key"
    facts = [fact for fact in (error.field, error.reason) if fact]
    return f"{text} ({', '.join(facts)})" if facts else text


def run(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run a subcommand's coroutine."""
    return asyncio.run(work)


def _keep(name: str) -> Any:
    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        if value is not None:
            settings = ctx.ensure_object(Settings)
            setattr(settings, name, value)
            # Read by name: the parameter may have been declared under another.
            is_environment = ctx.get_parameter_source(param.name or "") is ParameterSource.ENVIRONMENT
            settings.given[name] = "environment" if is_environment else "option"
        return value

    return callback


def complete_context(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """The names of contexts, for the shell."""
    try:
        return sorted(name for name in Contexts.read().by_name if name.startswith(incomplete))
    except ContextError:
        return []


def shared_options() -> list[click.Option]:
    """The global options, which may also stand after the subcommand."""
    return [
        click.Option(
            ["--address"],
            envvar="POSTDATE_ADDRESS",
            show_envvar=True,
            expose_value=False,
            callback=_keep("address"),
            help="Address of the broker, host:port; nodes of a cluster: a:7650,b:7650.  "
            f"[default: {postdate.DEFAULT_ADDRESS}]",
        ),
        click.Option(
            ["--context"],
            envvar="POSTDATE_CONTEXT",
            show_envvar=True,
            expose_value=False,
            callback=_keep("context"),
            shell_complete=complete_context,
            help="Context to use, as named with `postdate context add`.",
        ),
        click.Option(
            ["--output", "-o"],
            envvar="POSTDATE_OUTPUT",
            show_envvar=True,
            type=click.Choice(["table", "json", "jsonl"]),
            expose_value=False,
            callback=_keep("output"),
            help="Output format.  [default: table]",
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
            help="Time to keep trying while the broker cannot be reached.  [default: 5s]",
        ),
        *credential_options(),
    ]


def credential_options() -> list[click.Option]:
    """Options that say how to trust the broker, and what to show it.

    `postdate-broker` has the same texts; a test compares them.
    """
    texts = {
        "tls-ca": ("FILE", "TLS, with this CA bundle to verify the certificate of the broker."),
        "tls-cert": ("FILE", "Client certificate; requires --tls-key."),
        "tls-key": ("FILE", "Private key of --tls-cert."),
        "tls-server-name": ("NAME", "Name in the server certificate, if it is not the host of the address."),
        "token-file": ("FILE", "File of the bearer token; or set POSTDATE_TOKEN."),
    }
    switches = {
        "tls": "Use TLS and trust the CA certificates of the system.",
        "allow-plaintext-token": "Allow the token to be sent without TLS.",
    }
    return [
        *(_credential_option(name, help_, metavar=metavar) for name, (metavar, help_) in texts.items()),
        *(_credential_option(name, help_, is_flag=True, default=None) for name, help_ in switches.items()),
    ]


def _credential_option(name: str, help_: str, **how: Any) -> click.Option:
    attribute = name.replace("-", "_")
    return click.Option(
        [f"--{name}"],
        envvar=f"POSTDATE_{attribute.upper()}",
        expose_value=False,
        callback=_keep(attribute),
        help=help_,
        show_envvar=True,
        **how,
    )


class Command(click.Command):
    """A subcommand that takes the global options too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epilog = (
            self.epilog or "Options of `postdate --help`, such as --output and --context, may stand here too."
        )
        for option in shared_options():
            # An environment variable speaks once, on the outside, or it would undo a flag given there.
            option.envvar = None
            option.hidden = True
            self.params.append(option)


class CommandGroup(click.Group):
    """A group whose members take the global options too."""

    command_class = Command
    group_class = type
