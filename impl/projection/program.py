"""The words of which a projected program is made: compute, start a collective, wait for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from impl.projection import ranks
from impl.projection.hardware import Group
from impl.projection.machine import Collective, Machine
from impl.projection.timeline import COMPUTE, Array, Op, Timeline
from impl.projection.uncertain import Cost

DP, TP = 0, 1
"""Axes of the mesh."""
AXES = {"dp": (DP,), "tp": (TP,), "world": (DP, TP)}
"""Axes along which a communicator's ranks meet, by its stream."""


class Program:
    """What every rank of a (dp, tp) mesh does on ``machine``, in program order."""

    def __init__(self, mesh: tuple[int, int], machine: Machine) -> None:
        self.machine = machine
        self.timeline = Timeline(mesh, shared=machine.shared)
        self._now: list[Op] = []
        self._known: dict[tuple[str, tuple[float, ...], Group], Cost] = {}

    def do(self, name: str, phase: str, cost: Cost | Array, evidence: dict[str, float] | None = None) -> Op:
        """Compute; ``cost`` as for :meth:`Timeline.add`."""
        op = self.timeline.add(COMPUTE, name, phase, cost, evidence=evidence)
        self._now = [op]
        return op

    def start(self, stream: str, name: str, phase: str, cost: Cost | Array, count: Any, **more: Any) -> Op:
        """Start a collective of ``stream`` (a key of :data:`AXES`) once the compute stream has come this far.

        count: logical bytes of every rank.
        """
        return self.timeline.add(
            stream, name, phase, cost, after=self._now, meet=AXES[stream], bytes=count, dimension=stream, **more
        )

    def wait(self, ops: Sequence[Op], phase: str) -> Op | None:
        """Wait for collectives; return the wait, None where they ran on the compute stream themselves."""
        op = self.timeline.wait(ops, phase)
        self._now = [op] if op else list(ops) or self._now
        return op

    def collective(self, kind: Collective, sizes: Sequence[float], group: Group) -> Cost:
        """Return what the machine says, which is asked once."""
        key = kind, tuple(sizes), group
        if key not in self._known:
            self._known[key] = self.machine.collective(kind, sizes, group)
        return self._known[key]

    def each(self, values: Array, price: Callable[[float], Cost]) -> tuple[Array, dict[str, float]]:
        """Return the seconds of ranks whose work is a number ``[*mesh]``, and the evidence of the largest one's."""
        amounts = ranks.Amounts(values.shape)
        for value in np.unique(values[values > 0]):
            amounts.add(float(value), values == value)
        return amounts.cost(price)
