"""Which optimizer updates which parameter, and why."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from impl.errors import ConfigError, unknown
from impl.models.parameters import ParamSpec
from impl.optimizers.base import registry

ELEMENTWISE = "adamw"
"""The optimizer of everything that the matrix optimizer does not take."""

EXCLUDED = (
    ("word_embeddings", "word embedding"),
    ("output_layer", "output layer"),
    ("router", "expert router"),
    ("gate_weight", "gate of experts"),
)
"""Parts of names of 2-D parameters that stay with AdamW (Megatron-Canzona's rule), with the reason."""


@dataclass(frozen=True)
class Route:
    """Where one parameter goes.  ``optimizer`` is None if the parameter is frozen."""

    name: str
    optimizer: str | None
    reason: str


def route(parameters: Sequence[ParamSpec], matrix_optimizer: str, frozen: Sequence[str] = ()) -> tuple[Route, ...]:
    """Return one route a parameter, in the given order; the first rule that matches decides.

    1. A name that matches one of the ``frozen`` globs is not trained.  2. If ``matrix_optimizer`` is AdamW it takes
    everything.  3. What is not 2-D, 4. embedding, output layer and router go to AdamW.  5. Other matrices go to
    ``matrix_optimizer``.

    Raises :class:`ConfigError` for an unknown optimizer, a glob that matches nothing, or if nothing is left to train.
    """
    known = registry()
    if matrix_optimizer not in known:
        raise unknown("optimizer", matrix_optimizer, known)
    names = [p.name for p in parameters]
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
            raise ConfigError(f"frozen pattern {pattern!r} matches no parameter: the nearest are {', '.join(near)}")
    routes = tuple(_first_match(p, matrix_optimizer, frozen) for p in parameters)
    if routes and all(r.optimizer is None for r in routes):
        raise ConfigError(f"frozen patterns {', '.join(map(repr, frozen))} leave no parameter to train")
    check(parameters, routes)
    return routes


def is_matrix(parameter: ParamSpec) -> bool:
    """Return whether a matrix optimizer takes ``parameter`` (rules 3 to 5 of :func:`route`)."""
    return len(parameter.shape) == 2 and not any(part in parameter.name for part, _ in EXCLUDED)


def _first_match(parameter: ParamSpec, matrix_optimizer: str, frozen: Sequence[str]) -> Route:
    name = parameter.name
    for pattern in frozen:
        if fnmatchcase(name, pattern):
            return Route(name, None, f"frozen by {pattern!r}")
    if matrix_optimizer == ELEMENTWISE:
        return Route(name, ELEMENTWISE, f"{ELEMENTWISE} was chosen for everything")
    if len(parameter.shape) != 2:
        return Route(name, ELEMENTWISE, f"{len(parameter.shape)}-D")
    for part, reason in EXCLUDED:
        if part in name:
            return Route(name, ELEMENTWISE, reason)
    return Route(name, matrix_optimizer, "matrix")


def check(parameters: Sequence[ParamSpec], routes: Sequence[Route]) -> None:
    """Raise ValueError unless every parameter has exactly one route and every route is a parameter's."""
    counts = Counter(r.name for r in routes)
    names = [p.name for p in parameters]
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"two parameters are called {name}")
    for name in names:
        if counts[name] != 1:
            raise ValueError(f"{name} has {counts[name]} routes instead of 1")
    for name in counts.keys() - set(names):
        raise ValueError(f"{name} has a route but is no parameter")


def report(parameters: Sequence[ParamSpec], routes: Sequence[Route]) -> str:
    """Return aligned text: parameters and elements of each optimizer, then one row a parameter."""
    check(parameters, routes)
    sizes = {p.name: p for p in parameters}
    labels = [r.optimizer or "frozen" for r in routes]
    totals = [
        (label, labels.count(label), sum(sizes[r.name].numel for r in routes if (r.optimizer or "frozen") == label))
        for label in dict.fromkeys(labels)
    ]
    head = [(label, f"{count:,} parameters", f"{elements:,} elements") for label, count, elements in totals]
    rows = [
        (label, r.name, " x ".join(map(str, sizes[r.name].shape)), r.reason)
        for label, r in zip(labels, routes, strict=True)
    ]
    return "\n".join([*_align(head, right=(1, 2)), "", *_align([("optimizer", "parameter", "shape", "why"), *rows])])


def _align(rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
