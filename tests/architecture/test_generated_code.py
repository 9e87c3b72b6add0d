"""The stubs come from the pinned generator, which is old enough for every runtime the package allows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GENCODE = (6, 31, 1)
PROTOS = ("protos", "storage-protos")
MESSAGES = sorted([*ROOT.glob("postdate_api/v1/*_pb2.py"), *ROOT.glob("broker/storage/v1/*_pb2.py")])
SERVICES = sorted(ROOT.glob("postdate_api/v1/*_pb2_grpc.py"))
GENERATOR = ROOT / "build/protos-venv/bin/python"


def project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_proto_has_stubs():
    protos = {path.stem for folder in PROTOS for path in (ROOT / folder).rglob("*.proto")}
    assert {path.stem.removesuffix("_pb2") for path in MESSAGES} == protos
    assert all(path.with_suffix(".pyi").exists() for path in [*MESSAGES, *SERVICES])


@pytest.mark.parametrize("path", MESSAGES, ids=lambda path: path.stem)
def test_messages_come_from_the_pinned_generator(path):
    assert f"# Protobuf Python Version: {'.'.join(map(str, GENCODE))}\n" in path.read_text()


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.stem)
def test_services_come_from_the_pinned_generator(path):
    (pin,) = project()["dependency-groups"]["protos"]
    version = pin.removeprefix("grpcio-tools==")
    assert f"GRPC_GENERATED_VERSION = '{version}'\n" in path.read_text()


def test_generated_code_loads_under_every_runtime_allowed():
    """Code of one protobuf release loads under that one and later ones, up to the end of the next major."""
    (requirement,) = (item for item in project()["project"]["dependencies"] if item.startswith("protobuf"))
    ((low, high),) = re.findall(r"^protobuf>=([0-9.]+),<([0-9]+)$", requirement)
    assert tuple(map(int, low.split("."))) >= GENCODE
    assert int(high) - 1 <= GENCODE[0] + 1


@pytest.mark.skipif(not GENERATOR.exists(), reason="the generator is not installed; `make check` installs it")
def test_stubs_match_protos():
    check = [str(GENERATOR), str(ROOT / "tools/generate_protos.py"), "--check"]
    run = subprocess.run(check, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_sync_classes_are_those_of_the_asyncio_ones():
    done = subprocess.run(
        [sys.executable, "tools/generate_sync.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_proto_of_the_api_names_its_package_in_each_language():
    """Without these a generator for Go stops, and one for Java or C# writes what nobody would."""
    for path in sorted((ROOT / "protos").rglob("*.proto")):
        options = dict(re.findall(r"^option (\w+) = (.+);$", path.read_text(), re.MULTILINE))
        assert options == {
            "csharp_namespace": '"Postdate.V1"',
            "go_package": '"postdate.dev/go/v1;postdatev1"',
            "java_multiple_files": "true",
            "java_outer_classname": f'"{path.stem.capitalize()}Proto"',
            "java_package": '"dev.postdate.v1"',
        }, path


def test_what_a_client_generates_from_is_the_api_alone():
    folders = {path.parent.relative_to(ROOT).as_posix() for path in (ROOT / "protos").rglob("*.proto")}
    assert folders == {"protos/postdate/v1"}, (
        "records on disk lie in storage-protos, what is imported in third_party"
    )
