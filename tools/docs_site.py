"""Hooks of the site (mkdocs.yml): pages from outside docs/, and links that hold there and on git hosts.

In every document links are relative paths of the repository. On the site a link to another page leads to that page,
and shows its title where its text was the file's name; one to anything else (code, protos, folders) is left as text,
because the site does not have it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "clients/typescript/README.md": "typescript.md",
}
SOURCES = {page: source for source, page in PAGES.items()}

_LINK = re.compile(r"\[(?P<text>[^\]\[]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
_ROW = re.compile(r"^\|.*$", re.MULTILINE)
_CODE = re.compile(r"`[^`]*`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    return plain_pipes(site_links(markdown, page.file.src_uri))


def site_links(markdown: str, page: str) -> str:
    """A document with its links as the site wants them; `page` is its path on the site."""
    folder = posixpath.dirname(SOURCES.get(page, f"docs/{page}"))

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match["path"]))
        text = match["text"]
        if (ROOT / target / "README.md").is_file():
            target += "/README.md"
        source = ROOT / target
        if target in PAGES:
            target = f"docs/{PAGES[target]}"
        elif not source.exists():
            return match[0]  # mkdocs says that it is broken
        elif not target.startswith("docs/") or source.is_dir():
            return text
        if text.endswith(".md") and posixpath.basename(text) == posixpath.basename(match["path"]):
            text = title(source)
        path = posixpath.relpath(target.removeprefix("docs/"), posixpath.dirname(page))
        return f"[{text}]({path}{match['anchor'] or ''})"

    return _LINK.sub(replaced, markdown)


def plain_pipes(markdown: str) -> str:
    """A git host wants a bar that is part of code in a table escaped; here it would show the backslash."""
    return _ROW.sub(lambda row: _CODE.sub(lambda code: code[0].replace("\\|", "|"), row[0]), markdown)


def title(source: Path) -> str:
    return next(line[2:].strip() for line in source.read_text().splitlines() if line.startswith("# "))
