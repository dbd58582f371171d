"""``python -m impl optimizers``: every optimizer that can be named, with its settings, state and cost."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

import torch
from pydantic.fields import FieldInfo

from impl.errors import ConfigError
from impl.harness import optimizer_files
from impl.optimizers.base import HyperParameters, Optimizer, Shape, create, registry

HELP = "list the optimizers: settings with defaults, state and cost for given shapes"
EPILOG = """\
Add one: one module in impl/optimizers/ and one file in experiments/optimizers/, see docs/adding-an-optimizer.md."""
SHAPES = ("4096x1024", "1024x4096", "2048x2048")
"""A tall, a wide and a square matrix."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.epilog = EPILOG
    add = parser.add_argument
    add("name", nargs="*", help="which optimizers, default all")
    add("--shape", nargs="+", default=SHAPES, metavar="MxN", help=f"rows x columns, default {' '.join(SHAPES)}")
    add("--json", action="store_true", help="print one JSON object, optimizers by name")


def run(args: argparse.Namespace) -> int:
    """Print the list; returns 0.  Raises :class:`ConfigError` for an unknown optimizer or a shape that is none."""
    shapes = [parse_shape(text) for text in args.shape]
    known = registry()
    files = optimizer_files.read()
    for name in args.name:
        create(name)
    found = {name: describe(name, known[name], shapes, files.get(name)) for name in args.name or sorted(known)}
    print(json.dumps(found, indent=2) if args.json else readable(found))
    return 0


def parse_shape(text: str) -> Shape:
    """Return the shape written as ``4096x1024``; raises :class:`ConfigError` for anything else."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise ConfigError(f"--shape {text!r}: write rows x columns of a matrix, for example 4096x1024")
    rows, columns = text.split("x")
    return int(rows), int(columns)


def describe(
    name: str, cls: type[Optimizer], shapes: Sequence[Shape], file: optimizer_files.OptimizerFile | None
) -> dict[str, Any]:
    """Return what is known of one optimizer as plain data; costs and state with the default settings.

    ``display_name`` and ``experiments`` are those of its ``file``.
    """
    optimizer = create(name)
    return {
        "name": name,
        "display_name": file.display_name if file else name,
        "summary": first_sentence(inspect.getdoc(cls)),
        "module": cls.__module__,
        "kind": "atomic" if cls.atomic else "elementwise",
        "scale_invariant": cls.scale_invariant,
        "cost_formula": cls.cost_formula,
        "hyper_parameters": hyper_parameters(cls.Hyper),
        "counters": list(cls.counters),
        "health_metrics": dict(cls.health_metrics),
        "experiments": sorted(file.experiments) if file else [],
        "shapes": {"x".join(map(str, shape)): _costs(optimizer, shape) for shape in shapes},
    }


def hyper_parameters(hyper: type[HyperParameters]) -> list[dict[str, Any]]:
    """Return name, type, default and description of each hyper-parameter."""
    texts = descriptions(hyper)
    defaults = hyper().model_dump(mode="json")
    return [
        {
            "name": name,
            "type": type_text(field.annotation, field.metadata),
            "default": defaults[name],
            "description": field.description or texts.get(name, ""),
        }
        for name, field in hyper.model_fields.items()
    ]


def type_text(annotation: Any, limits: Sequence[Any] = ()) -> str:
    """Return a type for people: ``float >= 0, < 1``, ``a | b`` of a choice, ``int or null``, ``[float, float]``."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        extra = [x for item in inner[1:] for x in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return type_text(inner[0], extra)
    if origin is Literal:
        return " | ".join(map(str, inner))
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is types.NoneType else type_text(part) for part in inner)
    if origin in (tuple, list):
        parts = [type_text(part) for part in inner]
        same = len(parts) > 1 and len(set(parts)) == 1
        return f"[{parts[0]} each]" if same else f"[{', '.join(parts)}]"
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = [f"{sign} {getattr(x, key):g}" for x in limits for key, sign in signs.items() if hasattr(x, key)]
    return " ".join([getattr(annotation, "__name__", str(annotation)), ", ".join(found)]).strip()


def descriptions(hyper: type[HyperParameters]) -> dict[str, str]:
    """Return what the docstrings of ``hyper`` and its bases say about each field, as ``name: text``."""
    found: dict[str, str] = {}
    names = "|".join(map(re.escape, hyper.model_fields))
    for cls in hyper.__mro__:
        if not names or not issubclass(cls, HyperParameters):
            continue
        text = " ".join((inspect.cleandoc(cls.__doc__ or "")).split())
        parts = re.split(rf"(?:^|(?<=[.;]) )((?:{names})(?:, (?:{names}))*): ", text)
        for heads, body in zip(parts[1::2], parts[2::2], strict=True):
            for name in heads.split(", "):
                found.setdefault(name, body.strip().rstrip(";."))
    return found


def first_sentence(text: str | None) -> str:
    """Return the first sentence of a docstring on one line."""
    return re.split(r"(?<=\.)\s", " ".join((text or "").split()))[0]


def _costs(optimizer: Optimizer, shape: Shape) -> dict[str, Any]:
    """Return state tensors, their bytes and FLOPs of one update of a matrix of ``shape``; nothing is allocated."""
    state = optimizer.init_state(shape, torch.device("meta"))
    tensors = {
        name: {
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "bytes": tensor.numel() * tensor.element_size(),
        }
        for name, tensor in state.items()
    }
    return {
        "flops": optimizer.flops(shape),
        "published_flops": optimizer.published_flops(shape),
        "state_bytes": optimizer.state_bytes(shape),
        "state": tensors,
    }


def readable(found: dict[str, dict[str, Any]]) -> str:
    """Return the list as text."""
    return "\n\n".join(_block(entry) for entry in found.values())


def _block(entry: dict[str, Any]) -> str:
    traits = [entry["kind"], *(["scale-invariant"] if entry["scale_invariant"] else [])]
    name = entry["name"] if entry["display_name"] == entry["name"] else f"{entry['name']} ({entry['display_name']})"
    lines = [f"{name}: {', '.join(traits)}", f"  {entry['summary']}"]
    settings = [
        (h["name"], h["type"], json.dumps(h["default"]), _shortened(h["description"]))
        for h in entry["hyper_parameters"]
    ]
    lines += ["", *_table([("setting", "type", "default", "what it is"), *settings])]
    costs = [
        (shape, _decimal(c["flops"]), _binary(c["state_bytes"]), _tensors(c["state"]))
        for shape, c in entry["shapes"].items()
    ]
    lines += ["", *_table([("shape", "FLOP a step", "state", "tensors"), *costs])]
    if entry["cost_formula"]:
        lines += ["", f"  cost: {entry['cost_formula']}"]
    if entry["experiments"]:
        lines += [f"  also in: {', '.join(entry['experiments'])}"]
    return "\n".join(lines)


def _tensors(state: dict[str, dict[str, Any]]) -> str:
    names = [f"{name} {'x'.join(map(str, t['shape']))}" for name, t in state.items() if t["shape"]]
    scalars = len(state) - len(names)
    return ", ".join([*names, *([f"{scalars} scalar{'s' if scalars > 1 else ''}"] if scalars else [])])


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _shortened(text: str, length: int = 70) -> str:
    return text if len(text) <= length else text[: length - 3].rsplit(" ", 1)[0] + "..."


def _decimal(value: float) -> str:
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.4g} {prefix}"
    return f"{value:.4g}"


def _binary(count: float) -> str:
    for prefix, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.4g} {prefix}"
    return f"{count:.0f} B"
