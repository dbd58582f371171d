"""What a planner is given, and the registry of strategies that turn it into a plan."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from impl.canzona.plan import Plan, validate
from impl.errors import unknown
from impl.models.parameters import ParamSpec

DEFAULT_CAPACITY_BYTES = 400 * 2**20 * 4


class Cost(Protocol):
    """What a planner asks of an optimizer (see :class:`impl.optimizers.base.Optimizer`); shapes are whole tensors."""

    name: ClassVar[str]
    atomic: ClassVar[bool]

    def flops(self, shape: tuple[int, ...]) -> float:
        """Operations of one update."""
        ...

    def published_flops(self, shape: tuple[int, ...]) -> float:
        """The same in the papers' convention."""
        ...

    def state_bytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of the state, master excluded."""
        ...


class PlanOptions(BaseModel):
    """The settings of a planner.

    bucket_elements: a bucket closes once it holds this many elements of a TP rank's flat buffer; None means
        Megatron's default ``max(40e6, 1e6 * dp)``.
    alpha: 0 cuts each bucket evenly, 1 fills the gaps that earlier buckets left (Canzona, Algorithm 1).
    fallback: keep the start-index plan unless the alpha plan is strictly better in ``cost``.
    cost: the measure of that test, and the weight of matrices in micro-groups.
    tp_mode: how matrices become micro-groups: ``no``, ``single``, ``slot`` or ``global``.
    capacity_bytes: bytes of the fused fp32 TP-local gradients that one host receives per micro-group and source.
    nv_version: which published version of NV-layerwise.
    split: whether fused matrices (QKV, gate/up) are updated as the matrices inside them: ``none``; ``update``, by
        whoever owns and hosts the fused one; ``atoms``, where ASC and Canzona also plan gate and up as matrices of
        their own.  The rows of query, key and value are interleaved in Megatron's layout, so that these keep one owner.
    split_qkv: into three ``matrices``, or into one per head.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bucket_elements: int | None = Field(default=None, gt=0)
    alpha: float = Field(default=1.0, ge=0.0, le=1.0)
    fallback: bool = True
    cost: Literal["numel", "memory", "flops"] = "numel"
    tp_mode: Literal["no", "single", "slot", "global"] = "global"
    capacity_bytes: int = Field(default=DEFAULT_CAPACITY_BYTES, gt=0)
    nv_version: Literal["ping-pong", "lpt-numel", "lpt-ns"] = "lpt-ns"
    split: Literal["none", "update", "atoms"] = "none"
    split_qkv: Literal["matrices", "heads"] = "matrices"

    def bucket_size(self, dp: int) -> int:
        """Return the bucket size in elements for ``dp`` data-parallel ranks."""
        return self.bucket_elements or max(40_000_000, 1_000_000 * dp)


@dataclass(frozen=True)
class Problem:
    """What is to be planned.

    parameters: the trainable parameters in registration order.
    costs: for each parameter the optimizer that updates it, as its cost.
    """

    parameters: tuple[ParamSpec, ...]
    costs: tuple[Cost, ...]
    dp: int
    tp: int
    options: PlanOptions

    def members(self, *, atomic: bool) -> tuple[int, ...]:
        """Indices of the parameters whose optimizer is (or is not) atomic, in registration order."""
        return tuple(i for i, cost in enumerate(self.costs) if cost.atomic is atomic)

    def in_blocks(self) -> Problem:
        """Return the problem with ``split: atoms`` carried out (see :meth:`ParamSpec.in_blocks`)."""
        if self.options.split != "atoms":
            return self
        pairs = [
            (part, cost)
            for spec, cost in zip(self.parameters, self.costs, strict=True)
            for part in (spec.in_blocks() if cost.atomic else (spec,))
        ]
        return dataclasses.replace(self, parameters=tuple(p for p, _ in pairs), costs=tuple(c for _, c in pairs))


Strategy = Callable[[Problem], Plan]
_REGISTRY: dict[str, Strategy] = {}
PACKAGES = ("impl.canzona", "baselines")
"""Where strategies live: every module in these packages may register some."""


def strategy(name: str) -> Callable[[Strategy], Strategy]:
    """Function decorator: make a planner known under ``name`` (``[a-z0-9-]+``)."""

    def add(function: Strategy) -> Strategy:
        _REGISTRY[name] = function
        return function

    return add


def registry() -> dict[str, Strategy]:
    """Return every strategy by name, importing the modules of :data:`PACKAGES` first."""
    for package_name in PACKAGES:
        package = importlib.import_module(package_name)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package_name}.{module.name}")
    return dict(_REGISTRY)


def make_plan(
    name: str,
    parameters: Sequence[ParamSpec],
    costs: Sequence[Cost],
    dp: int,
    tp: int,
    options: PlanOptions | None = None,
) -> Plan:
    """Return the validated plan of strategy ``name``; raises :class:`impl.errors.ConfigError` for an unknown one."""
    known = registry()
    if name not in known:
        raise unknown("strategy", name, known)
    plan = known[name](Problem(tuple(parameters), tuple(costs), dp, tp, options or PlanOptions()))
    validate(plan)
    return plan
