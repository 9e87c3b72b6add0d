"""The command `postdate` is an extra: without what it needs it says what to install, and runs as a module with it."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["click", "rich"])
def test_where_only_the_library_is_installed_the_command_says_what_to_install(missing: str):
    done = run(f"import sys; sys.modules[{missing!r}] = None; from postdate.__main__ import main; main()")
    assert done.returncode == 1
    assert done.stderr.startswith("postdate: the command is not installed"), done.stderr
    assert missing in done.stderr and done.stderr.endswith("pip install 'postdate[cli]'\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_what_is_missing_of_the_library_itself_is_an_error_as_it_is():
    done = run("import sys; sys.modules['grpc'] = None; from postdate.__main__ import main; main()")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "grpc" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_library_imports_nothing_of_the_command():
    wanted = "{'click', 'rich', 'postdate.cli', 'postdate.commands'}"
    done = run(f"import sys, postdate, postdate.sync, postdate.testing; print({wanted} & sys.modules.keys())")
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.slow
def test_the_command_is_a_module_that_can_be_run():
    done = subprocess.run(
        [sys.executable, "-m", "postdate", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("postdate, version ")
