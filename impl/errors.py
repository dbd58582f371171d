"""The one error that a user's input may raise, and the nearest-name hint that goes with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(ValueError):
    """Bad input: one clear line that says what to write instead.

    The command line prints it as ``error: ...`` and exits with code 2; nothing has been started by then.
    """


def unknown(kind: str, name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a misspelt ``name``: the nearest known name first, then all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown {kind} {name!r}: {hint}known are {', '.join(names)}")
