"""``python -m paper_figures table|figure NAME --in TABLE --out FILE``, and ``show`` for the terminal.

NAME is a module of this package with the pure functions ``table(frame, published) -> str``,
``figure(frame, published) -> Figure`` and ``main_table(frame) -> str``; ``published`` holds the papers' claims.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd

import paper_figures
from impl.errors import ConfigError, unknown
from paper_figures import style


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
    """Write the Markdown table ``name`` of the tidy table ``source``."""
    text = _module(name).table(pd.read_parquet(source), pd.read_csv(published))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)


def write_figure(name: str, source: Path, published: Path, out: Path) -> None:
    """Write the figure ``name`` of the tidy table ``source`` as PDF and PNG."""
    style.save(_module(name).figure(pd.read_parquet(source), pd.read_csv(published)), out)


def show(results: Path) -> str:
    """Return the main table of every experiment in ``results``, and the paths of its tables and figures."""
    blocks, paths = [], []
    for name, module in modules().items():
        source = results / name / f"{name}.parquet"
        if source.exists():
            frame = pd.read_parquet(source)
            blocks.append(f"{name} ({', '.join(sorted(set(frame['kind'])))})\n\n{module.main_table(frame)}\n")
            paths += [str(p) for p in sorted(source.parent.glob(f"{name}*.*"))]
    if not blocks:
        raise ConfigError(f"no tables in {results}: run `make reproduce` first")
    return "\n".join([*blocks, "Tables and figures:", *(f"  {p}" for p in paths)])


def main(arguments: list[str] | None = None) -> int:
    """Run one command; bad input is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="python -m paper_figures", description="Tidy tables to tables and figures.")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("table", "figure"):
        sub = commands.add_parser(command)
        sub.add_argument("name", help="which table or figure")
        sub.add_argument("--in", dest="source", required=True, type=Path, help="tidy table, parquet")
        sub.add_argument("--published", required=True, type=Path, help="CSV of the papers' claims")
        sub.add_argument("--out", required=True, type=Path, help="file to write; a figure is written as .pdf and .png")
    commands.add_parser("show").add_argument("--results", required=True, type=Path, help="folder of one tier")
    args = parser.parse_args(arguments)
    try:
        if args.command == "show":
            print(show(args.results))
        else:
            write = write_table if args.command == "table" else write_figure
            write(args.name, args.source, args.published, args.out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _module(name: str) -> ModuleType:
    known = modules()
    if name not in known:
        raise unknown("table or figure", name, known)
    return known[name]


if __name__ == "__main__":
    sys.exit(main())
