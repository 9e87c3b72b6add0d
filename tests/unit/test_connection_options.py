"""Options that say how to reach a broker have one text in `postdate` and `postdate-broker`."""

from __future__ import annotations

import click

from broker.cli import main
from postdate.commands.settings import credential_options


def test_both_commands_say_the_same_of_the_same_options() -> None:
    texts = {option.name: option.help for option in credential_options()}
    command = main.commands["compact"]
    shared = {
        parameter.name: parameter.help
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name in texts
    }
    assert len(shared) > 5
    assert shared == {name: texts[name] for name in shared}
