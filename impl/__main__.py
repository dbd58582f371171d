"""``python -m impl COMMAND ...``: every module of :mod:`impl.cli` is a command.

Bad input ends with one line ``error: ...`` and exit code 2, before anything is started.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import impl.cli
from impl.errors import ConfigError, unknown

DESCRIPTION = "Plan, run and measure distributed training of matrix optimizers."


class Parser(argparse.ArgumentParser):
    """A parser that raises :class:`ConfigError` instead of printing usage and leaving."""

    def error(self, message: str) -> NoReturn:
        """Raise the message as :class:`ConfigError`."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def commands() -> dict[str, str]:
    """Return the module of every command by the command's name."""
    modules = sorted(module.name for module in pkgutil.iter_modules(impl.cli.__path__))
    return {name.replace("_", "-"): name for name in modules}


def description(module: str) -> str:
    """Return the ``HELP`` text of a command without importing it: some take seconds."""
    for folder in impl.cli.__path__:
        path = Path(folder) / f"{module}.py"
        if not path.exists():
            continue
        for node in ast.parse(path.read_text()).body:
            names = [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
            if isinstance(node, ast.Assign) and names == ["HELP"] and isinstance(node.value, ast.Constant):
                return str(node.value.value)
    return ""


def overview() -> str:
    """Return the text of ``python -m impl --help``."""
    known = commands()
    width = max(map(len, known))
    lines = [f"  {name:{width}}  {description(module)}" for name, module in known.items()]
    return "\n".join(
        ["usage: python -m impl COMMAND ...", "", DESCRIPTION, "", "commands:", *lines, "", "COMMAND --help says more."]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (without the program's name); return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(overview())
        return 0 if words else 2
    try:
        return dispatch(words[0], words[1:])
    except ConfigError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads the output (`| head`) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def dispatch(name: str, words: Sequence[str]) -> int:
    """Run command ``name``; raises :class:`ConfigError` for bad input."""
    known = commands()
    if name not in known:
        raise unknown("command", name, known)
    command = importlib.import_module(f"impl.cli.{known[name]}")
    parser = Parser(
        prog=f"python -m impl {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    return command.run(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main())
