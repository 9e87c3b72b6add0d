"""`postdate completion`, and the names that the shell completes by asking the broker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import click
from click.shell_completion import BashComplete, CompletionItem, FishComplete, ShellComplete, ZshComplete

import postdate
from postdate.commands.config_file import ContextError
from postdate.commands.settings import Command, CommandFailed, Settings

_PATIENCE_S = 1.0  # who presses the tabulator key does not wait longer
_VARIABLE = "_POSTDATE_COMPLETE"

_SHELLS: dict[str, type[ShellComplete]] = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}
_HINTS = {
    "bash": """\
# Completion for postdate. Now, for this shell:
#   source <(postdate completion bash)
# For all shells to come (with the package bash-completion):
#   mkdir -p ~/.local/share/bash-completion/completions
#   postdate completion bash > ~/.local/share/bash-completion/completions/postdate
""",
    # Its first line has to come first: zsh looks there for what the file completes.
    "zsh": """\
# Completion for postdate. Now, for this shell (after `autoload -Uz compinit && compinit`):
#   source <(postdate completion zsh)
# For all shells to come, in a folder of your fpath:
#   mkdir -p ~/.zfunc && postdate completion zsh > ~/.zfunc/_postdate
#   in ~/.zshrc: fpath+=~/.zfunc; autoload -Uz compinit && compinit
""",
    "fish": """\
# Completion for postdate. Now, for this shell:
#   postdate completion fish | source
# For all shells to come:
#   postdate completion fish > ~/.config/fish/completions/postdate.fish
""",
}


@click.command("completion", cls=Command, short_help="Print the completion script for a shell.")
@click.argument("shell", type=click.Choice(list(_SHELLS)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the SHELL script that completes commands, options, topics and subscriptions.

    Its first lines say how to install it.
    """
    # `source` would look for the shell's program, to warn of old ones; the script is the same for all.
    maker = _SHELLS[shell](ctx.find_root().command, {}, "postdate", _VARIABLE)
    script = maker.source_template % maker.source_vars()
    if shell == "zsh":
        tag, _, script = script.partition("\n")
        click.echo(tag)
    click.echo(_HINTS[shell] + script.strip("\n"))


class _Name(click.ParamType[str]):
    """A name that the broker knows."""

    name = "text"

    def __init__(self, look: Callable[[postdate.Client, click.Context], Any]) -> None:
        self._look = look

    def convert(self, value: Any, _param: click.Parameter | None, _ctx: click.Context | None) -> Any:
        return value

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[Any]]:
        given = ctx.params.get(param.name or "")
        taken = set(given) if isinstance(given, list | tuple) else set()
        names = _ask(ctx, self._look)
        return [CompletionItem(name) for name in names if name.startswith(incomplete) and name not in taken]


async def _topics(client: postdate.Client, _ctx: click.Context) -> list[str]:
    return [each.name async for each in client.topics.list()]


async def _subscriptions(client: postdate.Client, ctx: click.Context) -> list[str]:
    return [each.name async for each in client.subscriptions.list(ctx.params["topic"])]


def _ask(ctx: click.Context, look: Callable[[postdate.Client, click.Context], Any]) -> list[str]:
    """Ask the broker; nothing if it does not answer: a shell has no place for an error."""
    settings = ctx.ensure_object(Settings)
    settings.retry_for = timedelta(0)

    async def work() -> list[str]:
        async with asyncio.timeout(_PATIENCE_S), settings.client() as client:
            found: list[str] = await look(client, ctx)
            return found

    try:
        return asyncio.run(work())
    except (postdate.PostdateError, CommandFailed, ContextError, TimeoutError, OSError, ValueError, KeyError):
        return []


TOPIC = _Name(_topics)
SUBSCRIPTION = _Name(_subscriptions)
