"""Generate what comes of the protos, the Python stubs and docs/api.md, or check that what is committed is up to date.

With --descriptors it writes the descriptor set of a release instead: what grpcurl and other tools read the API from.

Runs in build/protos-venv (`make protos`, `make check`): grpcio-tools is pinned to an old release, so that
what it generates loads under every protobuf runtime the package allows.
"""

from __future__ import annotations

import argparse
import filecmp
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
THIRD_PARTY = ROOT / "third_party"
RECORDS = ROOT / "storage-protos/postdate/storage/v1"
STUBS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")
API_REFERENCE = Path("docs/api.md")
API_STUBS = Path("postdate_api/v1")
STUB_FOLDERS = (API_STUBS, Path("broker/storage/v1"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when something is stale")
    parser.add_argument(
        "--descriptors", type=Path, metavar="FILE", help="write the descriptor set, nothing else"
    )
    arguments = parser.parse_args()
    if arguments.descriptors:
        write_descriptors(arguments.descriptors)
        return 0
    check = arguments.check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        known = {*stub_paths(fresh), *stub_paths(ROOT), API_REFERENCE}
        stale = [path for path in known if differs(fresh / path, ROOT / path)]
        if check:
            for path in sorted(stale):
                print(f"{path} is not what the protos generate; run `make protos`", file=sys.stderr)
            if not stale:
                print(f"Stubs and docs/api.md match the protos (grpcio-tools {version('grpcio-tools')}).")
            return bool(stale)
        for path in stale:
            install(fresh / path, ROOT / path)
        print(f"{len(stale)} files changed.")
        return 0


def generate(out: Path) -> None:
    """Write every stub and the API reference below `out`, at their paths in the repository."""
    for folder in STUB_FOLDERS:
        (out / folder).mkdir(parents=True)
    api = out / API_STUBS
    services = sorted(PROTOS.glob("postdate/v1/*.proto"))
    run_protoc(
        *includes(),
        f"--python_out={out}",
        f"--pyi_out={out}",
        f"--grpc_python_out={out}",
        *(str(path.relative_to(PROTOS)) for path in services),
    )
    for path in (out / "postdate/v1").iterdir():
        move_stub(path, api / path.name)
    for path in services:
        complete_pyi(api / f"{path.stem}_pb2.pyi")
        write_grpc_pyi(path, api / f"{path.stem}_pb2_grpc")
    # A module of generated code knows itself by the path it was generated from, so the on-disk records are
    # presented to protoc under the path of the package that holds them.
    run_protoc(
        f"-Ibroker/storage/v1={RECORDS}",
        f"--python_out={out}",
        f"--pyi_out={out}",
        *(f"broker/storage/v1/{path.name}" for path in sorted(RECORDS.glob("*.proto"))),
    )
    write_descriptors(out / "postdate.binpb")
    (out / API_REFERENCE).parent.mkdir()
    script = [sys.executable, str(ROOT / "tools/api_reference.py")]
    subprocess.run([*script, str(out / "postdate.binpb"), str(out / API_REFERENCE)], check=True)


def write_descriptors(path: Path) -> None:
    """The calls and all they need, with their comments, as one FileDescriptorSet."""
    run_protoc(
        *includes(),
        "--include_imports",
        "--include_source_info",
        f"--descriptor_set_out={path}",
        *(str(each.relative_to(PROTOS)) for each in sorted(PROTOS.glob("postdate/v1/*.proto"))),
    )


def includes() -> list[str]:
    """Return the include paths of the API's protos: its own, google/rpc, google/protobuf."""
    return [f"-I{folder}" for folder in (PROTOS, THIRD_PARTY, files("grpc_tools") / "_proto")]


def run_protoc(*arguments: str) -> None:
    if protoc.main(["protoc", *arguments]) != 0:
        sys.exit(1)


def move_stub(generated: Path, moved: Path) -> None:
    """Move a stub into the package of the API, and its imports with it.

    The protos keep their own paths: whoever generates stubs of them too has both in one pool of descriptors.
    """
    package = ".".join(API_STUBS.parts)
    text = re.sub(r"\bfrom postdate\.v1 import\b", f"from {package} import", generated.read_text())
    moved.write_text(re.sub(r"'postdate\.v1\.(\w+_pb2)'", rf"'{package}.\1'", text))


def complete_pyi(stub: Path) -> None:
    """Say of what the mappings are: a type checker in strict mode takes a bare one for a gap in the types."""
    stub.write_text(re.sub(r"(?<!as )\b_Mapping\b(?!\[)", "_Mapping[str, object]", stub.read_text()))


def write_grpc_pyi(proto: Path, stub: Path) -> None:
    """Give the gRPC stub a type stub, or drop it when the proto has no service.

    The generator writes none, and without one every call of a stub is an untyped call.
    """
    text = re.sub(r"//[^\n]*", "", proto.read_text())
    services = re.findall(r"\bservice\s+(\w+)\s*\{(.*?)\n\}", text, re.DOTALL)
    if not services:
        stub.with_suffix(".py").unlink()
        return
    lines = [f"# Generated from {proto.relative_to(PROTOS)}. DO NOT EDIT!", "from typing import Any", ""]
    for name, body in services:
        calls = re.findall(r"\brpc\s+(\w+)\s*\(", body)
        lines += [f"class {name}Stub:", "    def __init__(self, channel: Any) -> None: ..."]
        lines += [f"    {call}: Any" for call in calls]
        lines += ["", f"class {name}Servicer:"]
        lines += [f"    def {call}(self, request: Any, context: Any) -> Any: ..." for call in calls]
        add = f"add_{name}Servicer_to_server"
        lines += ["", f"def {add}(servicer: {name}Servicer, server: Any) -> None: ...", ""]
    stub.with_suffix(".pyi").write_text("\n".join(lines))


def stub_paths(root: Path) -> set[Path]:
    found = (path for folder in STUB_FOLDERS for stub in STUBS for path in (root / folder).glob(stub))
    return {path.relative_to(root) for path in found}


def differs(fresh: Path, committed: Path) -> bool:
    return not (fresh.exists() and committed.exists() and filecmp.cmp(fresh, committed, shallow=False))


def install(fresh: Path, committed: Path) -> None:
    if fresh.exists():
        committed.parent.mkdir(parents=True, exist_ok=True)
        committed.write_bytes(fresh.read_bytes())
    else:
        committed.unlink()


if __name__ == "__main__":
    sys.exit(main())
