"""Checks the SDK with pyright: strictly, and that every public name of it has a type that is known (no network needed).

python tools/check_sdk_types.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_LIBRARY = ("postdate.commands.", "postdate.cli.", "postdate.__main__.")


def main() -> int:
    strict = pyright("--project", str(ROOT))
    if strict.returncode != 0:
        print(strict.stdout + strict.stderr)
        return 1
    print(strict.stdout.strip().splitlines()[-1])
    verified = pyright("--verifytypes", "postdate", "--ignoreexternal", "--outputjson")
    symbols = json.loads(verified.stdout)["typeCompleteness"]["symbols"]
    public = [each for each in symbols if each["isExported"] and not each["name"].startswith(NOT_LIBRARY)]
    unknown = [each for each in public if not each["isTypeKnown"]]
    for each in unknown:
        print(each["name"], *(f"    {found['message']}" for found in each["diagnostics"]), sep="\n")
    print(f"{len(public)} public names of the SDK, {len(unknown)} without a known type.")
    return 1 if unknown or not public else 0


def pyright(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # `python` and `node` of this environment
    return subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": path,
            "PYTHONPATH": f"{ROOT / 'clients/python'}:{ROOT}",
            "PYRIGHT_PYTHON_USE_BUNDLED_PYRIGHT": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
