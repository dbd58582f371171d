"""``python -m paper_figures table|figure NAME --in TABLE --out FILE``, ``claims``, ``partial``, and ``show``.

NAME is a module of this package with the pure functions ``table(frame, published) -> str``,
``figure(frame, published) -> Figure`` and ``main_table(frame) -> str``; ``published`` holds the papers' claims.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pandas as pd

import paper_figures
from impl.errors import ConfigError, unknown
from paper_figures import ledger, ledger_document, paper_set, partial, reference, render, style


def modules() -> dict[str, ModuleType]:
    """Return the modules that have both ``table`` and ``figure``, by name."""
    found = {}
    for info in pkgutil.iter_modules(paper_figures.__path__):
        if not info.name.startswith("_"):
            module = importlib.import_module(f"paper_figures.{info.name}")
            if all(hasattr(module, name) for name in ("table", "figure", "main_table")):
                found[info.name] = module
    return found


def write_table(name: str, source: Path, published: Path, out: Path) -> None:
    """Write the table ``name`` of the tidy table ``source`` as Markdown, HTML and LaTeX beside each other."""
    render.write(_module(name).table(_tidy(source), pd.read_csv(published)), out)


def write_figure(name: str, source: Path, published: Path, out: Path) -> None:
    """Write the figure ``name`` of the tidy table ``source`` as PDF and PNG."""
    style.save(_module(name).figure(_tidy(source), pd.read_csv(published)), out)


def show(results: Path) -> str:
    """Return the main table of every experiment in ``results``, the head of the ledger, and where everything is."""
    blocks, made = [], []
    for name, module in modules().items():
        source = results / name / f"{name}.parquet"
        if source.exists():
            frame = pd.read_parquet(source)
            blocks.append(f"{name} ({', '.join(sorted(set(frame['kind'])))})\n\n{module.main_table(frame)}\n")
            made.append(name)
    if not made:
        raise ConfigError(f"no tables in {results}: run `make reproduce` first")
    claims = results / "claims" / "claims.parquet"
    if claims.exists():
        blocks.append(f"claims\n\n{ledger_document.head(pd.read_parquet(claims))}\n")
        made.append("claims")
    where = f"Tables (md, html, tex, csv, parquet) and figures (pdf, png) are in {results}:"
    return "\n".join([*blocks, where, *(f"  {name}/{name}.html" for name in made)])


def write_incomplete(folder: Path, tier: str, results: Path, published: Path) -> str:
    """Make table and figure of every experiment of which only some runs have ended, and the ledger with them.

    They are put in the folder ``partial`` of the tier's ``results``; what an earlier call left there is removed.
    folder: of the experiments.  published: folder of the papers' claims.  Returns what was made.
    """
    found, out = list(partial.incomplete(folder, tier, results)), partial.open_folder(results)
    made = []
    for one in found:
        source, claims = partial.tabulate(one, folder, tier, out), published / f"{one.published}.csv"
        try:
            write_table(one.name, source, claims, source.with_suffix(".md"))
            write_figure(one.name, source, claims, source.with_suffix(".pdf"))
            made.append(f"{one.name}: table and figure of {one.there} of {one.asked} runs in {source.parent}")
        except Exception as error:  # the others are wanted all the more
            made.append(f"{one.name}: no table of {one.there} of {one.asked} runs: {type(error).__name__}: {error}")
    if not found:
        shutil.rmtree(out)
        return "no experiment is half made"
    partial.link_rest(folder, tier, results)
    ledger.write(folder / "claims.yaml", out, tier, out / "claims" / "claims.md")
    return "\n".join([*made, f"claims, as far as these tables can judge them: {out / 'claims' / 'claims.md'}"])


def show_kept(results: Path, out: Path, readme: Path) -> str:
    """Keep a run as the reference and say how many files were written."""
    return f"{len(reference.keep(results, out, readme))} files written in {out}, and {readme}"


def show_copies(results: Path, out: Path) -> str:
    """Gather the files for a paper and say how many there are."""
    return f"{len(paper_set.gather(results, out))} figures and tables for a paper are in {out}"


def move_claims(source: Path, out: Path) -> None:
    """Write the ledger ``source``, a Markdown file, to ``out``, a file of another folder, with its links led right."""
    prefix = os.path.relpath(source.parent.parent, out.parent)
    text = source.read_text().replace("](../", f"]({prefix}/")
    render.write(text.replace(f"]({source.stem}.png)", f"]({prefix}/{source.parent.name}/{source.stem}.png)"), out)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; bad input is one line on stderr and exit code 2."""
    args = _parser().parse_args(arguments)
    try:
        text = args.run(args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if text:
        print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m paper_figures", description="Tidy tables to tables and figures.")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, text: str, run: Callable[[argparse.Namespace], str | None]) -> Callable[..., object]:
        sub = commands.add_parser(name, help=text)
        sub.set_defaults(run=run)
        return sub.add_argument

    for name, write in (("table", write_table), ("figure", write_figure)):
        option = add(name, f"write a {name}", lambda a, write=write: write(a.name, a.source, a.published, a.out))
        option("name", help="which table or figure")
        option("--in", dest="source", required=True, type=Path, help="tidy table, parquet")
        option("--published", required=True, type=Path, help="CSV of the papers' claims")
        option("--out", required=True, type=Path, help="file to write; the other forms are beside it")
    option = add("show", "print the main tables of one tier", lambda a: show(a.results))
    option("--results", required=True, type=Path, help="folder of one tier")
    judge = "judge every published claim by the tables of one tier"
    option = add("claims", judge, lambda a: ledger.write(a.ledger, a.results, a.tier, a.out))
    option("--ledger", required=True, type=Path, help="YAML list of the claims")
    option("--results", required=True, type=Path, help="folder of one tier")
    option("--tier", required=True, help="which tier it is")
    option("--out", required=True, type=Path, help="file to write; the other forms are beside it")
    option = add("move-claims", "copy the ledger to another folder", lambda a: move_claims(a.source, a.out))
    option("--in", dest="source", required=True, type=Path, help="claims.md of a tier")
    option("--out", required=True, type=Path, help="file to write; the other forms are beside it")
    incomplete = "make the tables of experiments of which only some runs have ended"
    option = add("partial", incomplete, lambda a: write_incomplete(a.experiments, a.tier, a.results, a.published))
    option("--experiments", required=True, type=Path, help="folder of the experiments")
    option("--tier", required=True, help="which tier it is")
    option("--results", required=True, type=Path, help="folder of one tier")
    option("--published", required=True, type=Path, help="folder of the papers' claims")
    option = add("paper", "copy figures and LaTeX tables to one folder", lambda a: show_copies(a.results, a.out))
    option("--results", required=True, type=Path, help="folder of one tier")
    option("--out", required=True, type=Path, help="folder to make; what is there is replaced")
    option = add(
        "reference", "commit a run's tables, figures and claims", lambda a: show_kept(a.results, a.out, a.readme)
    )
    option("--results", required=True, type=Path, help="folder of one tier")
    option("--out", required=True, type=Path, help="folder of the reference run")
    option("--readme", required=True, type=Path, help="file that shows the head of the ledger")
    return parser


def _tidy(source: Path) -> pd.DataFrame:
    try:
        frame = pd.read_parquet(source)
    except (OSError, ValueError) as error:  # pyarrow's are among these
        raise ConfigError(f"cannot read the tidy table {source} ({error}): delete it and make it again") from None
    if frame.empty:
        raise ConfigError(f"the tidy table {source} has no rows: the experiment asks for no runs")
    return frame


def _module(name: str) -> ModuleType:
    known = modules()
    if name not in known:
        raise unknown("table or figure", name, known)
    return known[name]


if __name__ == "__main__":
    sys.exit(main())
