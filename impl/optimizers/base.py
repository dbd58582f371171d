"""The interface of an optimizer, and the registry that finds it by name."""

from __future__ import annotations

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from impl.errors import ConfigError, unknown

State = dict[str, Tensor]
Shape = tuple[int, ...]


class HyperParameters(BaseModel):
    """Base of every optimizer's settings: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class Work:
    """What one update does, by what limits its speed: the mean over a refresh period.  For rooflines, not for plans.

    products: FLOPs of matrix products, by the dtype of their factors.
    qr, eigh: FLOPs of Householder QR (``8/3 q^3`` with its Q) and of symmetric eigensolvers (``25 q^3``).
    passes: bytes that elementwise operations read and write.
    kernels: how many a GPU launches.
    """

    products: Mapping[str, float] = field(default_factory=dict)
    qr: float = 0.0
    eigh: float = 0.0
    passes: float = 0.0
    kernels: float = 0.0


class Optimizer(ABC):
    """The update rule of one tensor.

    Learning rate, decoupled weight decay and masters belong to the engine, which applies
    ``p <- (1 - lr * weight_decay) * p - lr * update``.

    atomic: the update needs the whole matrix (Muon), so a tensor may not be cut; otherwise it is elementwise (AdamW)
        and any flat range of elements may be updated alone.
    scale_invariant: the update does not depend on the gradient's scale, so that gradient clipping is not applied
        to it (a clipped gradient would enter the momentum at another scale than its neighbours).
    counters: scalars of the state that count events over the whole run, for its record (``failures`` of a solver).
    cost_formula: what :meth:`flops` computes, for people.
    health_metrics: what :meth:`health` measures, each with the value above which something is wrong.
    """

    name: ClassVar[str]
    atomic: ClassVar[bool] = True
    scale_invariant: ClassVar[bool] = False
    counters: ClassVar[tuple[str, ...]] = ()
    cost_formula: ClassVar[str] = ""
    health_metrics: ClassVar[Mapping[str, float]] = MappingProxyType({})
    Hyper: ClassVar[type[HyperParameters]] = HyperParameters

    def __init__(self, hyper: HyperParameters) -> None:
        self.hyper = hyper

    @abstractmethod
    def init_state(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> State:
        """Return the fresh state for a tensor of ``shape``: tensors by name.

        dtype: of everything that accumulates, fp32 or fp64; gradients and updates have the same.
        """

    def place(self, state: State, index: int) -> None:  # noqa: B027  (most rules do not care)
        """Tell a fresh ``state`` which parameter of the plan it belongs to, for rules that take matrices in turn."""

    @abstractmethod
    def update(self, grad: Tensor, state: State, step: int) -> Tensor:
        """Advance ``state`` in place by one step and return the update, of the gradient's shape and dtype.

        grad: contiguous gradient of the state's dtype, whole matrix ``[m, n]`` if ``atomic``, else any shape.  Not
            modified, and finite: the engine skips a step whose gradients are not.
        step: 1-based number of this step.
        """

    def update_many(self, grads: Sequence[Tensor], states: Sequence[State], step: int) -> list[Tensor]:
        """Return the updates of several tensors; each must equal what :meth:`update` returns for it alone."""
        return [self.update(g, s, step) for g, s in zip(grads, states, strict=True)]

    def health(self, state: State, update: Tensor) -> dict[str, float]:
        """Return a value for each of :attr:`health_metrics`, after the step that gave ``update``; changes nothing.

        May be slow: it is asked every so many steps.
        """
        return {}

    @abstractmethod
    def flops(self, shape: Shape) -> float:
        """Floating-point operations of one update of a whole tensor of ``shape``."""

    def published_flops(self, shape: Shape) -> float:
        """The papers' cost convention where it differs from :meth:`flops` (see definitions in docs/numbers.md)."""
        return self.flops(shape)

    @abstractmethod
    def state_bytes(self, shape: Shape) -> int:
        """Bytes of the state of a tensor of ``shape``, the fp32 master not counted."""

    def work(self, shape: Shape) -> Work:
        """Return what an update of a whole tensor of ``shape`` does.

        By default: products in fp32 of all of :meth:`flops`, a pass over gradient and update, and two over the state.
        """
        return Work(
            products={"float32": self.flops(shape)},
            passes=12.0 * numel(shape) + 2.0 * self.state_bytes(shape),
            kernels=30,
        )


_REGISTRY: dict[str, type[Optimizer]] = {}
T = TypeVar("T", bound=type[Optimizer])


def register(name: str) -> Callable[[T], T]:
    """Class decorator: make an :class:`Optimizer` known under ``name`` (``[a-z0-9-]+``)."""

    def add(cls: T) -> T:
        if name in _REGISTRY and _REGISTRY[name].__qualname__ != cls.__qualname__:
            raise ValueError(f"optimizer {name!r} is registered twice")
        cls.name = name
        _REGISTRY[name] = cls
        return cls

    return add


def registry() -> dict[str, type[Optimizer]]:
    """Return every optimizer in the modules of ``impl.optimizers``, by name."""
    package = importlib.import_module("impl.optimizers")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"impl.optimizers.{module.name}")
    return dict(_REGISTRY)


def create(name: str, settings: dict[str, Any] | None = None) -> Optimizer:
    """Return the optimizer ``name`` with ``settings``.

    Raises :class:`ConfigError` for an unknown name or hyper-parameter, with the valid ones.
    """
    known = _REGISTRY if name in _REGISTRY else registry()  # looking for modules takes a while
    if name not in known:
        raise unknown("optimizer", name, known)
    cls = known[name]
    settings = settings or {}
    for key in settings:
        if key not in cls.Hyper.model_fields:
            raise unknown(f"hyper-parameter of {name}", key, cls.Hyper.model_fields)
    try:
        return cls(cls.Hyper(**settings))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(x) for x in first["loc"])
        raise ConfigError(f"{name}: {where}: {first['msg']} (got {first['input']!r})") from None


def numel(shape: Shape) -> int:
    """Elements of a tensor of ``shape``."""
    return math.prod(shape)
