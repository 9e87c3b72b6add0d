"""The command `postdate-broker`, also as `python -m broker`: says what to install where the broker lacks something."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from broker import cli  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in {"broker", "postdate", "postdate_api"}:
            raise  # nothing that could be installed
        # The SDK comes with this command, and without what the broker needs.
        sys.exit(
            f"postdate-broker: a part of the broker is not installed ({error}): pip install 'postdate[broker]'"
        )
    cli.main(prog_name="postdate-broker")


if __name__ == "__main__":
    main()
