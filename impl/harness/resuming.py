"""Going on from the checkpoint of another run: where it is, and whether it fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from impl.errors import ConfigError
from impl.harness import checkpoint, step_folders
from impl.harness.checkpoint import Meta
from impl.harness.record import RunFolder
from impl.harness.setup import create_optimizers
from impl.harness.spec import RunSpec, parse
from impl.models import catalogue

MAY_DIFFER = ("dp", "tp", "strategy", "plan", "reduction", "microbatches", "dtype", "steps", "eval_every",
              "checkpoint_every", "health_every", "max_skips", "offload_state", "runtime", "resume_from")  # fmt: skip
"""Settings of a run that goes on from another's checkpoint, and of ``plan`` all but what is split."""


def find(source: str) -> Path:
    """Return the folder of the checkpoint that ``source`` means: the newest of a run's folder, or itself.

    Raises :class:`ConfigError` if there is none.
    """
    path = Path(source).expanduser().absolute()
    if step_folders.step_of(path) is not None and path.is_dir():
        return path
    if not path.is_dir():
        raise ConfigError(f"resume_from {source!r} does not exist: give the folder of a run, or one of its checkpoints")
    folder = RunFolder(path).checkpoints
    newest = step_folders.latest(folder)
    if newest is None:
        raise ConfigError(
            f"resume_from {source!r} has no finished checkpoint: give a run that was started with checkpoint_every, or "
            "a folder like RUN/checkpoint/step-000020"
        )
    return step_folders.path_of(folder, newest)


def check(spec: RunSpec, out: Path) -> None:
    """Raise :class:`ConfigError` unless ``spec.resume_from``, if it is set, can be gone on from.

    out: the run's own folder; once it has checkpoints they are what it resumes from.
    """
    if spec.resume_from is None or step_folders.steps(RunFolder(out).checkpoints):
        return
    path = find(spec.resume_from)
    try:
        meta = checkpoint.check(path)
    except checkpoint.UNREADABLE as error:
        raise ConfigError(
            f"resume_from {spec.resume_from!r}: checkpoint {path.name} cannot be read ({str(error).splitlines()[0]}): "
            "give another one"
        ) from None
    _check_settings(spec, meta, path)


def _check_settings(spec: RunSpec, meta: Meta, path: Path) -> None:
    try:
        wrote = parse(RunSpec, meta.settings)
    except ConfigError as error:
        raise ConfigError(f"{path} was written by another version of the code: {error}") from None
    for key, there, here in _unequal("", _decisive(wrote), _decisive(spec)):
        raise ConfigError(
            f"{key} is {here!r} but {there!r} in {path}: a run that goes on from it may differ in "
            f"{', '.join(k for k in MAY_DIFFER if k != 'resume_from')} alone"
        )
    if spec.steps <= meta.step:
        raise ConfigError(f"steps is {spec.steps} but {path} is after step {meta.step} already: ask for more steps")


def _decisive(spec: RunSpec) -> dict[str, Any]:
    """Return the settings that must be the same, those of optimizers and layers with their defaults filled in."""
    data = {key: value for key, value in spec.resolved().items() if key not in MAY_DIFFER}
    data["layers"] = catalogue.load(spec.model, spec.layers).arch.num_hidden_layers
    del data["optimizer_settings"], data["adamw_settings"]
    rules = create_optimizers(spec)
    data |= {f"settings of {name}": rule.hyper.model_dump(mode="json") for name, rule in rules.items()}
    split = spec.resolved()["plan"].get("split", "none")  # which matrices have states of their own
    data["plan.split"] = split if split == "none" else spec.resolved()["plan"]["split_qkv"]
    return data


def _unequal(where: str, there: Any, here: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(there, dict) and isinstance(here, dict):
        for name in {**here, **there}:
            yield from _unequal(f"{where}.{name}" if where else name, there.get(name), here.get(name))
    elif there != here:
        yield where, there, here
