"""Machines for tests of projections: parts of another one switched off, or plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from impl.optimizers.base import Optimizer, Shape
from impl.projection.hardware import Group
from impl.projection.machine import Block, Collective, CopyTo, Machine
from impl.projection.uncertain import Cost
from impl.projection.uncertain import exact as certain


@dataclass(frozen=True)
class Altered:
    """``machine`` with every compute and every communication time passed through a function."""

    machine: Machine
    compute: Callable[[Cost], Cost] = field(default=lambda cost: cost)
    network: Callable[[Cost], Cost] = field(default=lambda cost: cost)
    shared: bool = False
    cores: int | None = None
    name: str = "altered"
    memory_bytes: int | None = None
    devices_per_node: int = 8

    def forward(self, block: Block) -> Cost:
        return self.compute(self.machine.forward(block))

    def backward(self, block: Block) -> Cost:
        return self.compute(self.machine.backward(block))

    def gradients(self, block: Block) -> Cost:
        return self.compute(self.machine.gradients(block))

    def update(self, optimizer: Optimizer, shape: Shape) -> Cost:
        return self.compute(self.machine.update(optimizer, shape))

    def apply(self, elements: int, dtype: str) -> Cost:
        return self.compute(self.machine.apply(elements, dtype))

    def norm(self, elements: int, *, exact: bool = False) -> Cost:
        return self.compute(self.machine.norm(elements, exact=exact))

    def attention(self, block: Block) -> Cost:
        return self.compute(self.machine.attention(block))

    def copy(self, count: float, where: CopyTo) -> Cost:
        return self.compute(self.machine.copy(count, where))

    def collective(self, kind: Collective, sizes: Sequence[float], group: Group) -> Cost:
        return self.network(self.machine.collective(kind, sizes, group))


def free(_: Cost) -> Cost:
    """No time at all."""
    return Cost.nothing()


@dataclass(frozen=True)
class Plain:
    """A machine of whole numbers: an update takes its matrix' rows, an exchange its bytes; the rest is free."""

    shared: bool = False
    cores: int | None = None
    name: str = "plain"
    memory_bytes: int | None = None
    devices_per_node: int = 8

    def forward(self, block: Block) -> Cost:
        return Cost.nothing()

    def backward(self, block: Block) -> Cost:
        return Cost.nothing()

    def gradients(self, block: Block) -> Cost:
        return Cost.nothing()

    def update(self, optimizer: Optimizer, shape: Shape) -> Cost:
        return Cost.of(certain(shape[0]), "rows")

    def apply(self, elements: int, dtype: str) -> Cost:
        return Cost.nothing()

    def norm(self, elements: int, *, exact: bool = False) -> Cost:
        return Cost.nothing()

    def attention(self, block: Block) -> Cost:
        return Cost.nothing()

    def copy(self, count: float, where: CopyTo) -> Cost:
        return Cost.nothing()

    def collective(self, kind: Collective, sizes: Sequence[float], group: Group) -> Cost:
        return Cost.of(certain(sum(sizes)), "bytes")
