"""Rank replay: each rank's own share of an optimizer step, one rank after the other on one device, with the real code.

A Canzona or ASC step sends nothing over data-parallel ranks, so what the slowest rank takes is what the step takes.
Only what a rank updates is allocated: its masters, gradients, parameters and states.  The tensor-parallel exchange
packs, copies and unpacks, but nothing goes over a wire.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from impl.canzona.buffers import FamilyBuffer, Run, runs_of
from impl.canzona.collectives import Communicator, Pending
from impl.canzona.mesh import Mesh
from impl.canzona.plan import EVERY, Family, Plan
from impl.canzona.updater import Updater
from impl.models.parameters import ParamSpec
from impl.optimizers.base import Optimizer, numel

LR, WEIGHT_DECAY = 1e-3, 0.01
CLIP = 0.5
"""Gradients of scale-dependent optimizers are scaled, as in most steps of a training with clipping."""


@dataclass(frozen=True)
class Place:
    """A rank of the mesh."""

    dp_rank: int
    tp_rank: int

    def number(self, tp: int) -> int:
        """Return its number in the mesh."""
        return self.dp_rank * tp + self.tp_rank


class Loopback(Communicator):
    """The tensor-parallel group as one rank sees it alone: what it sends comes back as what it receives."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def all_to_all(
        self, out: Tensor, data: Tensor, received: Sequence[int], sent: Sequence[int], phase: str
    ) -> Pending:
        """Fill ``out`` with what was to be sent, over and over."""
        if out.numel() and not data.numel():
            out.fill_(1e-3)  # this rank only receives
        at = 0
        while at < out.numel() and data.numel():
            part = min(data.numel(), out.numel() - at)
            out[at : at + part].copy_(data[:part])
            at += part
        return Pending([])


class ShareBuffer(FamilyBuffer):
    """What one rank updates of a family, and nothing else of it: no other rank's parameters, no module."""

    def __init__(self, plan: Plan, family: Family, dp_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.family = family
        self.runs = runs_of(plan, family, dp_rank)
        self.module_parameters = {}
        sizes = {run.name: run.end - run.start for run in self.runs}
        self._gradients = {run.start: torch.zeros(sizes[run.name], device=device) for run in self.runs}
        self._rounded = {name: torch.zeros(size, dtype=dtype, device=device) for name, size in sizes.items()}
        whole = dtype == torch.float32
        self.masters = {n: t if whole else torch.zeros(t.numel(), device=device) for n, t in self._rounded.items()}

    def gradient(self, start: int, end: int) -> Tensor:
        """Return the gradients of the run ``[start, end)``."""
        found = self._gradients[start]
        if len(found) != end - start:
            raise KeyError(f"{start}..{end} is no run of this rank")
        return found

    def publish(self, run: Run) -> None:
        """Round the master of ``run`` into its parameters (nothing to do for fp32 parameters)."""
        if self._rounded[run.name].dtype != torch.float32:
            self._rounded[run.name].copy_(self.masters[run.name])

    @property
    def gradients_by_run(self) -> dict[str, Tensor]:
        """The fp32 gradients by the names of the runs."""
        return {run.name: self._gradients[run.start] for run in self.runs}

    def draw(self, generator: torch.Generator) -> None:
        """Draw new gradients, none of them zero."""
        for gradient in self._gradients.values():
            gradient.normal_(std=1e-3, generator=generator)


class Share:
    """One rank's part of the step: its buffers and the real :class:`Updater`."""

    def __init__(
        self,
        plan: Plan,
        optimizers: Mapping[str, Optimizer],
        place: Place,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.plan, self.place = plan, place
        self.buffers = [ShareBuffer(plan, family, place.dp_rank, dtype, device) for family in plan.families]
        nobody = cast(dist.ProcessGroup, None)  # nothing is sent
        mesh = Mesh(plan.dp, plan.tp, place.dp_rank, place.tp_rank, nobody, nobody, nobody, device)
        rules = {family.name: optimizers[family.optimizer] for family in plan.families}
        tp = Loopback(plan.tp, place.tp_rank)
        self.updater = Updater(plan, mesh, self.buffers, rules, tp, weight_decay=WEIGHT_DECAY, offload=False)
        self._generator = torch.Generator(device).manual_seed(place.number(plan.tp))

    @torch.no_grad()
    def draw(self) -> None:
        """Give every run new gradients."""
        for buffer in self.buffers:
            buffer.draw(self._generator)

    @torch.no_grad()
    def step(self, lr: float = LR, scale: float = CLIP) -> None:
        """Do this rank's part of one optimizer step."""
        self.updater.steps += 1
        self.updater.update(lr, scale)


def share_bytes(plan: Plan, optimizers: Mapping[str, Optimizer], place: Place, dtype_bytes: int) -> float:
    """Return the bytes that a rank's replay holds: what it allocates for good, and what its largest micro-group takes.

    Of that, whole gradients, their updates and the updates packed for their way back.
    """
    total = 0.0
    hosts, here = _hosts(plan, place.dp_rank), (place.tp_rank, EVERY)
    for family in plan.families:
        rule = optimizers[family.optimizer]
        for run in runs_of(plan, family, place.dp_rank):
            elements = run.end - run.start
            total += elements * (4.0 + dtype_bytes + (0 if dtype_bytes == 4 else 4))
            if run.parameter is None:
                total += rule.state_bytes((elements,))
            elif hosts[run.parameter] in here:
                total += sum(map(rule.state_bytes, plan.parameters[run.parameter].matrices))
    groups = [
        sum(4.0 * plan.parameters[p].numel for p, h in zip(g.parameters, g.hosts, strict=True) if h in here)
        for g in plan.micro_groups[place.dp_rank]
    ]
    return total + 3.0 * max(groups, default=0.0)


def flops(plan: Plan, optimizers: Mapping[str, Optimizer], place: Place) -> float:
    """Return the planned operations of what a rank updates."""
    hosts, total = _hosts(plan, place.dp_rank), 0.0
    for family in plan.families:
        rule = optimizers[family.optimizer]
        for run in runs_of(plan, family, place.dp_rank):
            if run.parameter is None:
                total += rule.flops((run.end - run.start,))
            elif hosts[run.parameter] in (place.tp_rank, EVERY):
                total += sum(map(rule.flops, plan.parameters[run.parameter].matrices))
    return total


def _hosts(plan: Plan, dp_rank: int) -> dict[int, int]:
    groups = plan.micro_groups[dp_rank]
    return {p: host for group in groups for p, host in zip(group.parameters, group.hosts, strict=True)}


def fingerprint(plan: Plan, place: Place) -> str:
    """Return what decides the work of a rank: shapes, hosts and groups in their order, but not which layer they are of.

    Two ranks with equal fingerprints do the same.
    """
    specs = plan.parameters
    groups = [
        [[_kind(specs[p]), _role(host, place.tp_rank, plan.tp)] for p, host in zip(g.parameters, g.hosts, strict=True)]
        for g in plan.micro_groups[place.dp_rank]
    ]
    flat = [
        [family.name, [run.end - run.start for run in runs_of(plan, family, place.dp_rank) if run.parameter is None]]
        for family in plan.families
    ]
    return hashlib.sha256(json.dumps([groups, flat]).encode()).hexdigest()


def _kind(spec: ParamSpec) -> list[Any]:
    return [spec.shape, spec.tp_dim, spec.blocks, [numel(shape) for shape in spec.matrices]]


def _role(host: int, rank: int, tp: int) -> int:
    """Return what ``host`` is to ``rank``: itself, every rank, or how far away (which decides no more than packing)."""
    return host if host == EVERY else (host - rank) % tp


def distinct(plan: Plan, places: Sequence[Place]) -> list[tuple[Place, list[Place]]]:
    """Return ``places`` by equal work: the first of each kind, with all that do the same."""
    found: dict[str, list[Place]] = {}
    for place in places:
        found.setdefault(fingerprint(plan, place), []).append(place)
    return [(members[0], members) for members in found.values()]


def period_of(optimizers: Mapping[str, Optimizer]) -> int:
    """Return after how many steps the work repeats: the longest refresh period."""
    return max(int(getattr(rule.hyper, "period", 1)) for rule in optimizers.values())


def time_share(
    share: Share,
    samples: int,
    period: int,
    seconds: Callable[[Callable[[], object]], float],
    before: Callable[[], None],
) -> list[float]:
    """Return ``samples`` times of a step after two untimed ones, each the mean over ``period`` steps on new gradients.

    before: called ahead of every step.
    """
    times = []
    for _ in range(2 + samples * period):
        share.draw()
        before()
        times.append(seconds(share.step))
    timed = times[2:]
    return [sum(timed[at : at + period]) / period for at in range(0, len(timed), period)]
