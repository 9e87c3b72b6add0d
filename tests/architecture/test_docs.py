"""The documents build as a site without a warning, and the site needs nobody else's."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tools.docs_site import PAGES, plain_pipes, site_links

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).resolve().parents[2]
SITE_URL = "https://postdate.dev/"
# What a browser loads by itself, or a script is told to; links that a reader may follow are not among it.
LOADED = re.compile(
    r"""(?:<(?:script|img|iframe|source)\b[^>]*?\ssrc=|<link\b[^>]*?\shref=|url\()["']?([^"'>)\s]+)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning (a page outside the navigation, a broken link or anchor) fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return folder


def test_every_document_is_a_page(site: Path):
    documents = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    assert len(documents) > 15
    for path in [*documents, *map(Path, PAGES.values())]:
        folder = path.parent if path.name in {"index.md", "README.md"} else path.with_suffix("")
        assert (site / folder / "index.html").is_file(), path


def test_the_site_loads_nothing_from_elsewhere(site: Path):
    texts = {path: path.read_text() for kind in ("html", "css") for path in site.rglob(f"*.{kind}")}
    loaded = {(path.name, address) for path, text in texts.items() for address in LOADED.findall(text)}
    assert len(loaded) > 20
    elsewhere = {
        each for each in loaded if each[1].startswith(("http", "//")) and not each[1].startswith(SITE_URL)
    }
    assert elsewhere == set()


def test_runbook_addresses_of_alerts_are_on_the_site(site: Path):
    rules = [yaml.safe_load(path.read_text()) for path in (ROOT / "deploy/prometheus/rules").glob("*.yml")]
    addresses = [
        rule["annotations"]["runbook_url"]
        for each in rules
        for group in each["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert addresses
    for address in addresses:
        page, _, anchor = address.removeprefix(SITE_URL).partition("#")
        assert f'id="{anchor}"' in (site / page / "index.html").read_text(), address


@pytest.mark.parametrize(
    ("page", "link", "shown"),
    [
        ("index.md", "[a](docs/errors.md#reasons)", "[a](errors.md#reasons)"),
        ("index.md", "![a](docs/images/logo.svg)", "![a](images/logo.svg)"),
        ("index.md", "[docs/errors.md](docs/errors.md)", "[Errors](errors.md)"),
        ("concepts.md", "[a](../ARCHITECTURE.md)", "[a](architecture.md)"),
        ("concepts.md", "[ARCHITECTURE.md](../ARCHITECTURE.md)", "[How Postdate works](architecture.md)"),
        ("decisions/README.md", "[a](../benchmarks.md)", "[a](../benchmarks.md)"),
        ("index.md", "[a](docs/decisions)", "[a](decisions/README.md)"),
        ("typescript.md", "[a](../../protos/postdate/v1) [b](src/client.ts)", "a b"),
        (
            "api.md",
            "[a](https://example.org/x.md) [b](#anchor)",
            "[a](https://example.org/x.md) [b](#anchor)",
        ),
        ("api.md", "[a](missing.md)", "[a](missing.md)"),
    ],
)
def test_links_hold_on_the_site(page: str, link: str, shown: str):
    assert site_links(link, page) == shown


def test_bars_in_code_are_shown_as_they_are():
    assert plain_pipes("| `a\\|b` | c \\| d |\n`x\\|y`\n") == "| `a|b` | c \\| d |\n`x\\|y`\n"
