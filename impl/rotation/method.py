"""What distinguishes one pipeline method from another: its schedule, its update rules, and what it does about delay."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pydantic import ValidationError
from torch import Tensor

from impl.errors import ConfigError, unknown
from impl.optimizers.base import HyperParameters, Optimizer, create
from impl.rotation.schedule import Mode, Schedule, staleness


@dataclass(frozen=True)
class StageContext:
    """Where a method is applied.

    staleness: updates between the weights of a gradient and those it is applied to, once the pipeline is full; derived
        from the schedule.
    updates: of the whole run.
    profile: staleness of every stage, for methods that share a budget out; empty if not known.
    per_update: microbatches of an update.
    """

    stage: int
    stages: int
    staleness: int
    updates: int
    profile: tuple[int, ...] = ()
    per_update: int = 1


def contexts(schedule: Schedule) -> tuple[StageContext, ...]:
    """Return the context of every stage of ``schedule``."""
    profile = staleness(schedule)
    return tuple(
        StageContext(stage, schedule.stages, own, schedule.updates, profile, schedule.per_update)
        for stage, own in enumerate(profile)
    )


class Method:
    """A pipeline method; the base class is PipeDream with AdamW everywhere.

    Subclasses override what they change.  Weights and gradients are flat fp32 tensors of one family of one stage.
    """

    name: ClassVar[str]
    display_name: ClassVar[str]
    Hyper: ClassVar[type[HyperParameters]] = HyperParameters
    schedule: ClassVar[str] = "1f1b-async"
    """Name of the schedule: ``1f1b-async``, ``gpipe`` or ``1f1b-flush``."""
    modes: ClassVar[tuple[Mode, ...]] = ("stash", "no-stash-recompute", "2bw", "vertical-sync")
    """Modes that the method makes sense in; the first is its default."""

    def __init__(self, hyper: HyperParameters) -> None:
        self.hyper = hyper

    def check(self, context: StageContext) -> None:
        """Raise :class:`ConfigError` if the settings make no sense on this stage."""

    def matrix_optimizer(self, context: StageContext) -> Optimizer:
        """Return the optimizer of the stage's matrices."""
        return create("adamw", {"betas": (0.9, 0.99)})

    def elementwise_optimizer(self, context: StageContext) -> Optimizer:
        """Return the optimizer of everything else on the stage."""
        return create("adamw", {"betas": (0.9, 0.99)})

    def lr(self, lr: float, update: int, context: StageContext) -> float:
        """Return the learning rate of 1-based ``update`` on this stage; ``lr`` is the schedule's."""
        return lr

    def predict(self, newest: Tensor, memory: dict[str, Any], context: StageContext, lr: float) -> Tensor | None:
        """Return the weights that a forward runs on instead of ``newest`` (and its backward too), None for no change.

        newest: those of the version that the schedule gives the forward, the newest unless the mode keeps stages in
        step.  context: its staleness is that of this microbatch, less while the pipeline fills.
        memory: tensors, kept per stage and family between calls and saved with the stage; ``memory["update"]`` is the
        last step ``W[t] - W[t-1]`` if there has been one.
        """
        return None

    def backward_weights(self, newest: Tensor, memory: dict[str, Any], context: StageContext) -> Tensor | None:
        """Without a stash: the weights that a backward runs on instead of ``newest``, None for no change (PipeMare)."""
        return None

    def correct(self, gradient: Tensor, newest: Tensor, stale: Tensor, memory: dict[str, Any]) -> None:
        """Change ``gradient``, taken at the ``stale`` weights, in place before it is applied at the ``newest``."""


_REGISTRY: dict[str, type[Method]] = {}
PACKAGES = ("impl.rotation.methods", "baselines.pipeline")
"""Where methods live, one module each."""
M = TypeVar("M", bound=type[Method])


def method(name: str, display_name: str) -> Callable[[M], M]:
    """Class decorator: make a :class:`Method` known under ``name`` (``[a-z0-9-]+``)."""

    def add(cls: M) -> M:
        cls.name, cls.display_name = name, display_name
        _REGISTRY[name] = cls
        return cls

    return add


def registry() -> dict[str, type[Method]]:
    """Return every method by name, importing the modules of :data:`PACKAGES` first.

    The name of an optimizer without a method of its own is a method too: PipeDream with that optimizer for matrices.
    """
    for package_name in PACKAGES:
        package = importlib.import_module(package_name)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package_name}.{module.name}")
    from impl.rotation.methods.any_optimizer import of_registry  # which imports this module

    return of_registry() | _REGISTRY


def create_method(name: str, settings: dict[str, Any] | None = None) -> Method:
    """Return the method ``name`` with ``settings``; raises :class:`ConfigError` for unknown names or bad values."""
    known = registry()
    if name not in known:
        raise unknown("method", name, known)
    cls = known[name]
    for key in settings or {}:
        if key not in cls.Hyper.model_fields:
            raise unknown(f"setting of {name}", key, cls.Hyper.model_fields)
    try:
        return cls(cls.Hyper(**(settings or {})))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(x) for x in first["loc"])
        raise ConfigError(f"{name}: {where}: {first['msg']} (got {first['input']!r})") from None
