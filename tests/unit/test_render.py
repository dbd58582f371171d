"""One Markdown document becomes an offline page and bare LaTeX tables in which every character means itself."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from impl.errors import ConfigError
from paper_figures import markdown, render

LAPTOP = Path(__file__).parents[2] / "results" / "laptop"
WORST = "a|b_c%d$&#{}~^\\ <x>"
PIXEL = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010806000000"
    "1f15c4890000000d49444154789c6360606060000000050001a5f645400000000049454e44ae426082"
)


def checked(text: str) -> list[list[str]]:
    """Return the rows of every tabular of ``text`` in order; fails where LaTeX would not take it."""
    rows = []
    parts = re.split(r"\n\n", text.strip())
    for part in parts:
        comment, begin, top, head, middle, *body, end = part.split("\n")
        assert comment.startswith("% ")
        columns = re.fullmatch(r"\\begin\{tabular\}\{([lr]+)\}", begin)
        assert columns, begin
        assert (top, middle, end) == (r"\toprule", r"\midrule", r"\end{tabular}")
        bottom = body.index(r"\bottomrule")
        assert all(line.startswith(r"\multicolumn{") for line in body[bottom + 1 :])
        for line in (head, *body[:bottom]):
            rows.append(_cells(line))
            assert len(rows[-1]) == len(columns[1]), line
    return rows


def _cells(line: str) -> list[str]:
    assert line.endswith(r" \\")
    assert line[0] not in "[*", "read as an argument of the line break before"
    text = re.sub(r"\$(-|\\[a-z]+|\^\\circ|\^[23])\$", "", line.removesuffix(r" \\"))  # our formulas
    bare = re.sub(r"\\(text\w+|emph|dots|[&%$#_{}])", "", text)
    assert not re.search(r"[\\#%$_~^<>|`]", bare.replace("``", "")), line
    without = re.sub(r"\\[{}]", "", text)
    depth = 0
    for character in without:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0, line
    assert depth == 0, line
    assert all(c.isascii() or c.isalpha() for c in text), line
    return re.split(r"(?<!\\) & ", line.removesuffix(r" \\"))


class Page(HTMLParser):
    """What a page loads, its cells, and whether every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.cells: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "br", "hr"):
            self.open.append(tag)
        self.loaded += [value or "" for name, value in attrs if name == "src" or (tag == "link" and name == "href")]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open and {"td", "th"} & set(self.open):
            self.cells[-1] += data


def document(*rows: list[str]) -> str:
    header = ["name", *(f"x{i}" for i in range(len(rows[0]) - 1))]
    return markdown.document("A title", "Some words.", "## Part one", markdown.table(header, rows))


def test_a_tabular_has_heading_rules_alignment_and_a_note_on_the_dash():
    text = render.latex(document(["SC", "-1.5 [-2.0, 3.0]", "–"], [markdown.bold("Canzona"), "2 -- 3", "1 ± 2"]))
    assert text.splitlines() == [
        "% A title: Part one",
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"name & x0 & x1 \\",
        r"\midrule",
        r"SC & $-$1.5 [$-$2.0, 3.0] & \textendash{} \\",
        r"\textbf{Canzona} & 2 -{}- 3 & 1 $\pm$ 2 \\",
        r"\bottomrule",
        r"\multicolumn{3}{l}{\footnotesize \textendash{}: no value} \\",
        r"\end{tabular}",
    ]
    assert "no value" not in render.latex(document(["SC", "1"])), "nothing to explain"
    assert render.latex("# T\n\nwords\n").startswith("% this document has no table")


def test_every_special_character_is_escaped_and_marks_are_kept():
    text = render.latex(
        document([WORST, markdown.emphasis("α × β"), markdown.code("--a_b"), markdown.link("x_y", "https://e.org/a_b")])
    )
    row = checked(text)[1]
    assert row[0] == (
        r"a\textbar{}b\_c\%d\$\&\#\{\}\textasciitilde{}\textasciicircum{}\textbackslash{} "
        r"\textless{}x\textgreater{}"
    )
    assert row[1:] == [r"\emph{$\alpha$ $\times$ $\beta$}", r"\texttt{-{}-a\_b}", r"x\_y"]
    assert checked(render.latex(document(["[1] é", "😀"])))[1] == ["{}[1] é", "[U+1F600]"]


@pytest.mark.parametrize(
    "broken", [r"a & b & c \\", r"a_b & c \\", r"\textbf{a & c \\", r"a & c", r"[a & c \\", r"a & 5% \\"]
)
def test_the_check_of_latex_finds_what_is_wrong(broken):
    good = render.latex(document(["a", "b"]))
    assert checked(good)
    with pytest.raises(AssertionError):
        checked(good.replace(r"a & b \\", broken))


@example("__b__", "a_b _c_")
@settings(max_examples=150, deadline=None)
@given(*[st.text(st.sampled_from("ab1 \\`*_~$<>|&#[](){}!-+.:/@%^=;'\"–×"), min_size=1)] * 2)
def test_any_text_comes_back_from_a_cell(name, other):
    text = document([name, other], [markdown.bold("m"), "1"])
    (grid,) = render.tables(text)
    assert [render.plain(cell) for cell in grid.rows[1]] == [name.strip(), other.strip()]
    assert {t.type for cell in grid.rows[1] for t in cell.children or ()} <= {"text", "text_special"}
    checked(render.latex(text))
    assert [c.strip() for c in Page(render.html(text)).cells[2:4]] == [name.strip(), other.strip()]
    assert len({len(line) for line in text.splitlines() if line.startswith("|")}) == 1, "padding"


def test_a_page_loads_nothing_and_shows_markup_as_text(tmp_path):
    (tmp_path / "a b.png").write_bytes(PIXEL)
    text = document([WORST, "1"]) + "\n![a figure](a%20b.png) ![gone](https://e.org/x.png) <script>alert(1)</script>\n"
    page = render.html(text, tmp_path)
    found = Page(page)
    assert found.cells[2:] == [WORST, "1"]
    assert [source[:22] for source in found.loaded] == ["data:image/png;base64,"]
    assert "<script" not in page
    assert '<a href="https://e.org/x.png">gone</a>' in page
    assert "<title>A title</title>" in page
    assert '<meta charset="utf-8">' in page
    assert "prefers-color-scheme: dark" in page
    assert page.count('<td class="number">') == 1
    assert Page(render.html(text)).loaded == [], "without a folder"


@pytest.mark.parametrize("path", sorted(LAPTOP.glob("*.md")), ids=lambda path: path.stem)
def test_the_reference_runs_tables_become_latex_and_html(path):
    text = path.read_text()
    if path.stem != "README":
        grids = render.tables(text)
        assert sum(len(grid.rows) for grid in grids) == len(checked(render.latex(text)))
    assert Page(render.html(text)).loaded == []


def test_three_files_are_written_and_none_is_half(tmp_path):
    text = document(["é", "1"])
    out = tmp_path / "with space" / "t.md"
    render.write(text, out)
    assert sorted(p.name for p in out.parent.iterdir()) == ["t.html", "t.md", "t.tex"]
    assert out.read_text(encoding="utf-8") == text
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        render.write(text, tmp_path / "file" / "t.md")
