"""README and docs as data: their blocks of commands, the files that they show, their links."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.workflow.checkouts import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_DRAWN = re.compile(r"[─│►▼]|\S {3,}\S")
"""What drawings and lists in columns have and commands have not, once comments are gone."""


@dataclass(frozen=True)
class Block:
    """Commands of one block, and the lines that the page says they print."""

    page: Path
    commands: tuple[tuple[str, ...], ...]
    printed: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """The exit code of its last command, by what it prints."""
        starts = {line.split()[0].rstrip(":") for line in self.printed}
        return 2 if "error" in starts else 3 if "diverged" in starts else 0


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of commands of a page: those without a language that are no drawing."""
    text = page.read_text()
    found = list(_FENCE.finditer(text))
    for number, match in enumerate(found):
        language, body = match.groups()
        if language or _DRAWN.search(_without_comments(body)):
            continue
        commands = tuple(_words(body))
        after = found[number + 1] if number + 1 < len(found) else None
        follows = after is not None and after[1] == "text" and not text[match.end() : after.start()].strip()
        yield Block(page, commands, tuple(after[2].splitlines()) if after is not None and follows else ())


def _words(body: str) -> Iterator[tuple[str, ...]]:
    for line in body.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield tuple(words)


def _without_comments(body: str) -> str:
    return re.sub(r" *#.*$", "", body, flags=re.MULTILINE)


def spans(page: Path) -> list[str]:
    """Return what a page has in backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", page.read_text()))


def links(page: Path) -> list[tuple[str, str]]:
    """Return the links of a page that lead into the project: file, '' for the page itself, and anchor or ''."""
    found = re.findall(r"\]\(([^)\s]+)\)", _FENCE.sub("", page.read_text()))
    parts = (link.partition("#") for link in found if "://" not in link)
    return [(file, anchor) for file, _, anchor in parts]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def files(page: Path) -> dict[str, str]:
    """Return every file that a page shows in full, by its path."""
    return dict(re.findall(r"^`([\w./-]+\.py)`\n\n```\w+\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))


def added_lines(page: Path) -> list[tuple[str, str]]:
    """Return what a page adds to experiments: path and lines."""
    found = re.findall(r"^((?:`[\w./-]+\.yaml`(?:, )?)+)\n\n```yaml\n( +-.*?)^```$", page.read_text(), re.M | re.S)
    return [(path, lines) for paths, lines in found for path in re.findall(r"`([^`]+)`", paths)]
