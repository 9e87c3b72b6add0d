"""The manifest of a base: it says what was said, or that it is damaged."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.cluster.base_manifest import (
    HEADER_BYTES_MAX,
    Base,
    BaseFile,
    BaseManifest,
    base_name,
    chunk_places,
    decode_header,
    decode_manifest,
    encode_manifest,
)
from broker.errors import Corrupt, PostdateError
from broker.storage.backup_marker import backup_name

DIGEST, SEAL = f"{'ab' * 32}-0123abcd", "cd" * 32
numbers = st.integers(0, 1 << 50)
chunk_names = st.builds(
    lambda digest, nonce: f"{digest.hex()}-{nonce.hex()}",
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=4, max_size=4),
)


def a_file(path: str, size: int = 5, chunks: tuple[str, ...] = (DIGEST,), seal: str = "") -> BaseFile:
    return BaseFile(path, size, seal, chunks)


def a_manifest(*files: BaseFile, chunk_bytes: int = 10) -> BaseManifest:
    base = Base(
        base_name(7, "20261121T205812345Z-a"),
        "a",
        "broker",
        3,
        7,
        1,
        len(files),
        sum(max(file.size, 0) for file in files),
        9,
    )
    return BaseManifest(base, {file.path: file for file in files}, chunk_bytes)


@st.composite
def manifests(draw: st.DrawFn) -> BaseManifest:
    lsn, label, chunk_bytes = draw(numbers), draw(st.sampled_from(["", "nightly"])), draw(st.integers(1, 50))
    files = []
    for path in draw(st.sets(st.from_regex(r"\A(topics/[0-9]{1,3}/)?[a-z]{1,3}\.[0-9]{1,3}\Z"), max_size=5)):
        size = draw(st.integers(0, 200))
        chunks = draw(
            st.lists(chunk_names, min_size=-(-size // chunk_bytes), max_size=-(-size // chunk_bytes))
        )
        files.append(BaseFile(path, size, draw(st.sampled_from(["", SEAL])), tuple(chunks)))
    base = Base(
        base_name(lsn, backup_name(draw(st.integers(0, 1 << 42)), label)), label, "id",
        draw(numbers), lsn, draw(numbers), len(files), sum(file.size for file in files), draw(numbers),
    )  # fmt: skip
    return BaseManifest(base, {file.path: file for file in files}, chunk_bytes)


@pytest.mark.slow
@given(manifests())
def test_a_manifest_is_read_as_it_was_written(manifest: BaseManifest) -> None:
    data = encode_manifest(manifest)
    assert decode_manifest(data, "x") == manifest
    assert decode_header(data[:HEADER_BYTES_MAX], "x") == manifest.base
    for file in manifest.files.values():
        places = list(chunk_places(file, manifest.chunk_bytes))
        assert [place.name for place in places] == list(file.chunks)
        assert sum(place.length for place in places) == file.size
        assert all(place.offset % manifest.chunk_bytes == 0 and place.length > 0 for place in places)


def test_the_longest_header_is_within_its_bound() -> None:
    longest = (1 << 62) - 1
    name = base_name((1 << 62) - 1, backup_name(253_402_300_799_999, "x" * 64))
    base = Base(name, "x" * 64, "b" * 64, *[longest] * 6)
    data = encode_manifest(BaseManifest(base, {}, 1 << 26))
    assert decode_header(data[:HEADER_BYTES_MAX], "x") == base


def test_any_changed_byte_and_any_cut_is_damage() -> None:
    data = encode_manifest(a_manifest(a_file("a"), a_file("topics/1/b", 15, (DIGEST, DIGEST))))
    for at in range(len(data)):
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]):
            with pytest.raises(Corrupt):
                decode_manifest(damaged, "x")


@given(st.binary(max_size=300))
def test_any_bytes_are_a_manifest_or_damage(data: bytes) -> None:
    for decode in (decode_manifest, decode_header):
        with pytest.raises(Corrupt):
            decode(data, "x")


@pytest.mark.parametrize(
    "file",
    [
        a_file("../a"),
        a_file("/a"),
        a_file("a/../b"),
        a_file("a//b"),
        a_file(""),
        a_file(".hidden"),
        a_file("a\n"),
        a_file("a", size=-1, chunks=()),
        a_file("a", size=11),
        a_file("a", size=0),
        a_file("a", chunks=("../x",)),
        a_file("a", chunks=(DIGEST[1:],)),
        a_file("a", chunks=(DIGEST + "\n",)),
        a_file("a", chunks=(SEAL,)),
        a_file("a", seal="x"),
    ],
)
def test_a_file_that_leads_elsewhere_or_makes_no_sense_is_refused(file: BaseFile) -> None:
    with pytest.raises(Corrupt, match="damaged"):
        decode_manifest(encode_manifest(a_manifest(file)), "x")


def test_a_file_is_no_folder_of_another() -> None:
    assert decode_manifest(encode_manifest(a_manifest(a_file("a"), a_file("ab/c"))), "x")
    with pytest.raises(Corrupt, match="list of files"):
        decode_manifest(encode_manifest(a_manifest(a_file("a"), a_file("a/b"))), "x")


@pytest.mark.parametrize("wrong", [{"files": 2}, {"bytes": 6}, {"bytes": 0}])
def test_a_header_that_tells_another_size_than_its_files_have_is_refused(wrong: dict[str, int]) -> None:
    manifest = a_manifest(a_file("a"))
    assert decode_manifest(encode_manifest(manifest), "x")
    other = replace(manifest, base=replace(manifest.base, **wrong))  # type: ignore[arg-type]
    with pytest.raises(Corrupt, match="header is wrong"):
        decode_manifest(encode_manifest(other), "x")


def test_a_name_with_another_lsn_is_refused() -> None:
    manifest = a_manifest()
    for name in (base_name(8, "20261121T205812345Z-a"), "x", base_name(7, "")):
        other = replace(manifest, base=replace(manifest.base, name=name))
        with pytest.raises(Corrupt, match="header is wrong"):
            decode_manifest(encode_manifest(other), "x")


def test_a_manifest_of_another_version_says_so() -> None:
    data = encode_manifest(a_manifest()).replace(b'"version":1', b'"version":2', 1)
    with pytest.raises(PostdateError, match=r"version 2, this broker knows 1.*Use the version"):
        decode_header(data, "x")
