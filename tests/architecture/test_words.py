"""One word for one thing: labels of invariants, names of classes, beginnings of docstrings."""

from __future__ import annotations

import itertools
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.sources import facts_of

ROOT = Path(__file__).resolve().parents[2]
CODE = [
    path
    for folder in ("broker", "clients/python/postdate", "tests", "tools", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "_pb2" not in path.name and path != Path(__file__)
]
GLOSSARY = ROOT / "docs" / "glossary.md"
DOCUMENTS = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]

DEFINED = re.compile(r"^ {2,6}([A-Z]+-\d+) {2}", re.MULTILINE)
CITED = re.compile(r"\b([A-Z]{3,})-(\d+)\b")
# A letter and a number is a label from before they had words; P1 to P10 are the promises, S3 and R2 object stores.
BARE = re.compile(r"(?<![\w.-])(?!(?:P10|P[1-9]|S3|R2)\b)[A-Z]{1,2}\d{1,2}(?![\w-])")
# Names of other people's documents and algorithms, not labels.
FOREIGN = {"CET", "LICENSE", "PIP", "SHA", "UTF"}

TERM = re.compile(r"\*\*([^*]+)\*\*( of an? [a-z]+)?")

ROOMS = ("broker", "clients/python/postdate")
SAME_THING = {
    # Refusals, by reason.
    "AlreadyExists",
    "InvalidRequest",
    "LimitReached",
    "NotFound",
    "OutOfRange",
    "PermissionDenied",
    "PostdateError",
    "Unauthenticated",
    "Unavailable",
    # Values of the API.
    "Backup",
    "ChangeResult",
    "IdRange",
    "OwedMessage",
    "OwedState",
    "ScheduledCounts",
    "ScheduledState",
    "SubscriptionPolicy",
    "SubscriptionType",
    "TopicCheck",
    "TopicPolicy",
    # What the broker has, and the SDK's door to it.
    "Backups",
    "DeadLetters",
    "FakeBroker",
    "Schedule",
    "Subscription",
    "Subscriptions",
    # Messages that are stored together; a client's TLS settings and token.
    "Batch",
    "Credentials",
}
"""Names of classes that stand in both rooms."""

# A docstring begins with the noun or the verb that it is about.
QUESTION = re.compile(r"(What|Whether|Which|Who|Whom|Whose|How|When|Where|Why)\b")


def docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of all modules: (path and name, text)."""
    for path in CODE:
        for name, text in facts_of(path).docstrings:
            yield f"{path.relative_to(ROOT)} {name}".rstrip(), text


def test_labels_of_invariants_are_unique_and_every_citation_has_one():
    defined = Counter(label for _, text in docstrings() for label in DEFINED.findall(text))
    assert len(defined) > 100
    assert [label for label, count in defined.items() if count > 1] == []
    unknown = {
        f"{path.relative_to(ROOT)}: {word}-{number}"
        for path in [*CODE, *DOCUMENTS]
        for word, number in CITED.findall(path.read_text())
        if word not in FOREIGN and f"{word}-{number}" not in defined
    }
    assert unknown == set()


def comments_and_docstrings(path: Path) -> Iterator[str]:
    """Texts of a file for readers, each with the number of its line."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            is_docstring = token.type == tokenize.STRING and token.string.startswith('"""')
            if token.type == tokenize.COMMENT or is_docstring:
                for number, line in enumerate(token.string.splitlines(), token.start[0]):
                    yield f"{path.relative_to(ROOT)}:{number} {line.strip()}"


def test_labels_of_invariants_begin_with_a_word():
    """Both where they are defined and where they are cited: SNAPSHOT-1, not S1."""
    suspects = [path for path in CODE if BARE.search(path.read_text())]
    bare = [line for path in suspects for line in comments_and_docstrings(path) if BARE.search(line)]
    assert bare == []


def test_a_bare_label_is_noticed():
    """The check above, tried on what it is for."""
    assert [text for text in ("O1 as far", "see H1.", "(R3)") if not BARE.search(text)] == []
    assert [text for text in ("P1 to P10", "PDB1", "SNAPSHOT-1", "8 MiB", "ES256") if BARE.search(text)] == []


def classes_of(room: str) -> list[str]:
    """The names of the classes of the broker or the SDK; the `sync` mirrors the asyncio classes."""
    return [
        name
        for path in CODE
        if path.is_relative_to(ROOT / room) and "sync" not in path.parts
        for name in facts_of(path).classes
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_names_of_classes_are_unique(room: str):
    """Of private ones too: a traceback shows the name of a class, and not its module."""
    assert {name for name, count in Counter(classes_of(room)).items() if count > 1} == set()


def test_a_name_that_broker_and_sdk_share_is_of_the_same_thing_in_both():
    broker, sdk = (set(classes_of(room)) for room in ROOMS)
    assert broker & sdk == SAME_THING


def test_docstrings_begin_with_a_noun_or_a_verb():
    assert [place for place, text in docstrings() if QUESTION.match(text)] == []


def test_a_word_has_one_row_in_the_glossary():
    rows = [line.split("|")[1] for line in GLOSSARY.read_text().splitlines() if line.startswith("| **")]
    terms = Counter("".join(term) for row in rows for term in TERM.findall(row))
    assert len(terms) > 80
    assert [term for term, count in terms.items() if count > 1] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_rows_of_a_table_follow_its_head(path: Path):
    """A blank line ends a table: what follows is shown as text with bars."""
    before, is_code = "", False
    lines = path.read_text().splitlines()
    for line, after in itertools.pairwise([*lines, ""]):
        is_code ^= line.lstrip().startswith("```")
        if line.startswith("|") and not before.startswith("|") and not is_code:
            assert after.startswith("| ---"), line
        before = line
