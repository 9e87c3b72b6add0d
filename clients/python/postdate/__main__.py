"""The command `postdate`, also as `python -m postdate`: says what to install where only the library is installed."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from postdate import cli  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in {"click", "rich"}:
            raise  # nothing that this command needs beyond the library
        sys.exit(f"postdate: the command is not installed ({error}): pip install 'postdate[cli]'")
    cli.main()


if __name__ == "__main__":
    main()
