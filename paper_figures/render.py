"""One document, three files: its Markdown as it is, an offline HTML page, and its tables in LaTeX.

LaTeX is written here and not with pandas' ``Styler.to_latex``: cells come as Markdown, with bold and links, and are no
frame any more.
"""

from __future__ import annotations

import base64
import html as html_text
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from impl.errors import ConfigError
from impl.harness.tables import write_atomically
from paper_figures.markdown import DASH

SUFFIXES = (".md", ".html", ".tex")
NUMBER = re.compile(r"[<>≥≤±+−-]?\s*\d")
PICTURES = {".png": "image/png", ".svg": "image/svg+xml", ".jpg": "image/jpeg"}
STYLE = """\
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #ffffff; --line: #c9c9c9; --soft: #f3f4f6; --link: #0b5cad; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e6e6; --paper: #17191c; --line: #444a52; --soft: #23272d; --link: #7db7f5; }
}
html { background: var(--paper); color: var(--ink); }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 100rem; }
p, li { max-width: 52rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1.05rem; }
a { color: var(--link); }
code { background: var(--soft); padding: 0 0.2em; border-radius: 3px; }
img { max-width: 100%; background: #ffffff; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.7rem; text-align: left; white-space: nowrap; }
thead th { border-top: 2px solid var(--ink); border-bottom: 1px solid var(--ink); }
tbody tr:last-child td { border-bottom: 2px solid var(--ink); }
tbody tr:nth-child(even) { background: var(--soft); }
td.wide { white-space: normal; min-width: 18rem; max-width: 32rem; }
.number { text-align: right; }
"""
WIDE = 60
"""Characters from which on a cell of a page may break its line."""
SPECIAL = {
    **{c: "\\" + c for c in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "`": r"\textasciigrave{}"},
    **{
        "–": r"\textendash{}",
        "—": r"\textemdash{}",
        "‘": "`",
        "’": "'",
        "“": "``",
        "”": "''",
        "…": r"\dots{}",
        "\N{NO-BREAK SPACE}": "~",
    },
    **{"×": r"$\times$", "±": r"$\pm$", "·": r"$\cdot$", "−": "$-$", "→": r"$\to$", "∞": r"$\infty$", "√": r"$\surd$"},
    **{"≤": r"$\leq$", "≥": r"$\geq$", "≈": r"$\approx$", "≠": r"$\neq$", "²": "$^2$", "³": "$^3$", "°": r"$^\circ$"},
    **{"α": r"$\alpha$", "β": r"$\beta$", "γ": r"$\gamma$", "δ": r"$\delta$", "ε": r"$\epsilon$", "η": r"$\eta$"},
    **{"θ": r"$\theta$", "κ": r"$\kappa$", "λ": r"$\lambda$", "μ": r"$\mu$", "µ": r"$\mu$", "π": r"$\pi$"},
    **{"ρ": r"$\rho$", "σ": r"$\sigma$", "τ": r"$\tau$", "φ": r"$\phi$", "ω": r"$\omega$", "Δ": r"$\Delta$"},
    **{"Σ": r"$\Sigma$", "Φ": r"$\Phi$", "Ω": r"$\Omega$"},
}
"""How LaTeX writes a character that it would read as an instruction, or whose font lacks it."""
MARKS = {"strong_open": r"\textbf{", "strong_close": "}", "em_open": r"\emph{", "em_close": "}"}
BREAKS = ("softbreak", "hardbreak")


@dataclass(frozen=True)
class Grid:
    """A table of a document.

    heading: the document's title and the section that the table stands in.
    rows: the inline tokens of every cell, the header first; all rows have the same length.
    """

    heading: str
    rows: tuple[tuple[Token, ...], ...]

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether a column holds numbers: at least half of its cells that are no dash begin with one."""
        found = []
        for column in zip(*self.rows[1:], strict=True):
            texts = [text for text in map(plain, column) if text != DASH]
            found.append(2 * sum(bool(NUMBER.match(text)) for text in texts) >= max(len(texts), 1))
        return tuple(found) if found else (False,) * len(self.rows[0])


def html(document: str, folder: Path | None = None) -> str:
    """Return one HTML page that loads nothing, neither from the network nor from a file.

    document: Markdown.  Raw HTML in it is shown as text.  Images are looked for in ``folder`` and put into the page;
    one that is not there is a link with its description.
    """
    title = next((plain(b) for a, b in pairwise(_parse(document)) if a.type == "heading_open"), "ricercar")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html_text.escape(title)}</title>\n<style>\n{STYLE}</style>\n</head>\n"
        f"<body>\n{body(document, folder)}</body>\n</html>\n"
    )


def body(document: str, folder: Path | None = None) -> str:
    """Return what stands between the page's ``<body>`` tags (:func:`html`), to be put into another page."""
    tokens = _parse(document)
    _align(tokens)
    for token in tokens:
        token.children = [_picture(child, folder) for child in token.children] if token.children else token.children
    reader = _reader()
    text = reader.renderer.render(tokens, reader.options, {})
    return text.replace("<table>", '<div class="table"><table>').replace("</table>", "</table></div>")


def latex(document: str) -> str:
    """Return every table of the Markdown ``document`` as a bare booktabs ``tabular``, its heading as a comment above.

    A dash is explained in a row below the table.  Links are their text.
    """
    found = [_tabular(grid) for grid in tables(document)]
    return "\n\n".join(found or ["% this document has no table"]) + "\n"


def write(document: str, out: Path) -> None:
    """Write ``document`` as Markdown, HTML and LaTeX: ``out`` with each of :data:`SUFFIXES`, none of them ever half.

    Raises :class:`ConfigError` that names what cannot be written.
    """
    texts = dict(zip(SUFFIXES, (document, html(document, out.parent), latex(document)), strict=True))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        for suffix, text in texts.items():
            data = text.encode()
            write_atomically(out.with_suffix(suffix), lambda beside, data=data: beside.write_bytes(data))
    except OSError as error:
        raise ConfigError(f"cannot write {error.filename or out}: {error.strerror or error}") from None


def tables(document: str) -> list[Grid]:
    """Return the tables of a Markdown document in order."""
    return list(_grids(_parse(document)))


def plain(inline: Token) -> str:
    """Return the text of an inline token without its marks."""
    return "".join(" " if token.type in BREAKS else token.content for token in inline.children or ())


def escaped(text: str) -> str:
    """Return ``text`` so that LaTeX prints it as it is; a symbol that no font would have is its code point."""
    parts = []
    for character in unicodedata.normalize("NFC", text):
        if character in SPECIAL:
            parts.append(SPECIAL[character])
        elif (character.isascii() and character.isprintable()) or unicodedata.category(character)[0] in "LM":
            parts.append(character)
        else:
            parts.append(" " if character.isspace() else f"[U+{ord(character):04X}]")
    return "".join(parts)


def _reader() -> MarkdownIt:
    return MarkdownIt("commonmark", {"html": False}).enable("table")


def _parse(document: str) -> list[Token]:
    return _reader().parse(document)


def _grids(tokens: Sequence[Token]) -> Iterator[Grid]:
    headings: dict[str, str] = {}
    rows: list[list[Token]] = []
    for token, inside in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and inside:
            headings = {tag: text for tag, text in headings.items() if tag < token.tag} | {token.tag: plain(inside)}
        elif token.type == "table_open":
            rows = []
        elif token.type == "tr_open":
            rows.append([])
        elif token.type in ("th_open", "td_open") and inside:
            rows[-1].append(inside)
        elif token.type == "table_close":
            yield Grid(": ".join(headings.values()), tuple(tuple(row) for row in rows))


def _align(tokens: Sequence[Token]) -> None:
    """Set numbers flush right and text flush left, and let long texts break their line."""
    grids = _grids(tokens)
    grid, column = None, 0
    for token, inside in pairwise(tokens):
        if token.type == "table_open":
            grid = next(grids)
        elif token.type == "tr_open":
            column = 0
        elif token.type in ("th_open", "td_open") and grid:
            wide = token.type == "td_open" and len(plain(inside)) > WIDE
            names = [*(["number"] if grid.numeric[column] else []), *(["wide"] if wide else [])]
            token.attrs = {"class": " ".join(names)} if names else {}
            column += 1


def _picture(token: Token, folder: Path | None) -> Token:
    """Return an image with its file inside, or a link to one that is not in ``folder``; other tokens as they are."""
    if token.type != "image":
        return token
    source = str(token.attrs["src"])
    file = (folder or Path()) / unquote(source)
    kind = PICTURES.get(file.suffix)
    if folder is not None and kind and "://" not in source and file.is_file():
        token.attrs["src"] = f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
        return token
    link = html_text.escape(source)
    return Token("html_inline", "", 0, content=f'<a href="{link}">{html_text.escape(token.content or source)}</a>')


def _tabular(grid: Grid) -> str:
    columns = "".join("r" if numeric else "l" for numeric in grid.numeric)
    head, *body = [_row(row) for row in grid.rows]
    lines = [f"% {' '.join(grid.heading.split())}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule"]
    lines += [*body, r"\bottomrule"]
    if any(plain(cell) == DASH for row in grid.rows[1:] for cell in row):
        lines.append(rf"\multicolumn{{{len(columns)}}}{{l}}{{\footnotesize \textendash{{}}: no value}} \\")
    return "\n".join([*lines, r"\end{tabular}"])


def _row(cells: Sequence[Token]) -> str:
    text = " & ".join(_inline(cell) for cell in cells) + r" \\"
    return "{}" + text if text[0] in "[*" else text  # after \\ these two would be read as its arguments


def _inline(cell: Token) -> str:
    parts = []
    for token in cell.children or ():
        if token.type in MARKS:
            parts.append(MARKS[token.type])
            continue
        text = re.sub("-(?=-)", "-{}", escaped(" " if token.type in BREAKS else token.content))  # no dash out of two
        if token.type == "code_inline":
            parts.append(rf"\texttt{{{text}}}")
        else:
            parts.append(re.sub(r"(?<![\w.{}-])-(?=\d)", "$-$", text))  # a minus sign is longer than a hyphen
    return "".join(parts)
