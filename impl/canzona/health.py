"""What optimizers count and measure about themselves, put together over the mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from impl.canzona.collectives import Communicator
from impl.optimizers.base import Optimizer, State

PHASE = "health"
UNHEALTHY = math.inf
"""What a measurement that is no number counts as."""


class Health:
    """Collects :meth:`impl.optimizers.base.Optimizer.health` of the steps in which it is asked for."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._limits = {f"{o.name}.{m}": limit for o in optimizers for m, limit in o.health_metrics.items()}
        self._worst: dict[str, float] | None = None

    def start(self, *, measure: bool) -> None:
        """Begin a step; only with ``measure`` anything is measured in it."""
        self._worst = {} if measure else None

    def observe(self, optimizer: Optimizer, states: Sequence[State], updates: Sequence[Tensor]) -> None:
        """Let ``optimizer`` measure what it has just computed."""
        if self._worst is None or not optimizer.health_metrics:
            return
        for state, update in zip(states, updates, strict=True):
            for metric, value in optimizer.health(state, update).items():
                name = f"{optimizer.name}.{metric}"
                self._worst[name] = max(value if math.isfinite(value) else UNHEALTHY, self._worst.get(name, 0.0))

    def worst(self, world: Communicator, device: torch.device) -> dict[str, float]:
        """Return the worst value of every metric over all matrices, as ``optimizer.metric``; all ranks must call.

        Empty if the step was not measured.
        """
        if self._worst is None:
            return {}
        mine = torch.tensor([self._worst.get(name, 0.0) for name in self._limits], dtype=torch.float64, device=device)
        world.all_reduce(mine, PHASE, op=dist.ReduceOp.MAX).wait()
        return dict(zip(self._limits, mine.tolist(), strict=True))

    def alarms(self, worst: Mapping[str, float]) -> list[str]:
        """Return a line for each value of :meth:`worst` above what its optimizer calls healthy."""
        return [
            f"{name} is {value:.3g}, above {self._limits[name]:g}"
            for name, value in worst.items()
            if value > self._limits[name]
        ]


def counters(
    counted: Iterable[tuple[Optimizer, State]],
    optimizers: Iterable[Optimizer],
    world: Communicator,
    device: torch.device,
) -> dict[str, int]:
    """Return the sums of :attr:`Optimizer.counters` as ``optimizer.counter``; all ranks must call.

    counted: what this rank adds, so that every matrix is added once.
    """
    totals = {f"{o.name}.{counter}": 0.0 for o in optimizers for counter in o.counters}
    for optimizer, state in counted:
        for counter in optimizer.counters:
            totals[f"{optimizer.name}.{counter}"] += float(state[counter])
    sums = torch.tensor(list(totals.values()), dtype=torch.float64, device=device)
    world.all_reduce(sums, PHASE).wait()
    return {name: int(total) for name, total in zip(totals, sums.tolist(), strict=True)}
