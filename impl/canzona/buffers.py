"""The flat buffers: parameters and gradients of one family, and what this rank owns of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from impl.canzona.plan import Family, Plan, owned_range


@dataclass(frozen=True)
class Run:
    """A range of the flat buffer that one rank updates in one go.

    An atomic parameter is a run of its own.  Elementwise pieces that are neighbours in a bucket form one run: the
    alignment gaps between them hold zeros, which an elementwise update leaves alone.

    parameter: its index, or None for a run of elementwise pieces.
    """

    name: str
    start: int
    end: int
    parameter: int | None


class FamilyBuffer:
    """The parameters of one family in one flat tensor, and their fp32 gradients in another.

    Each module parameter becomes a view of ``parameters``.  Masters exist only for this rank's runs: views of the
    parameters where these are fp32 already, fp32 copies otherwise.
    """

    def __init__(self, plan: Plan, family: Family, modules: Mapping[str, nn.Parameter], dp_rank: int) -> None:
        self.family = family
        names = {slot.parameter: plan.parameters[slot.parameter].name for slot in family.slots}
        first = modules[next(iter(names.values()))]
        self.parameters = torch.zeros(family.numel, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(family.numel, dtype=torch.float32, device=first.device)
        self.module_parameters: dict[int, nn.Parameter] = {}
        self._gradient_views: dict[int, Tensor] = {}
        for slot in family.slots:
            parameter = modules[names[slot.parameter]]
            if parameter.dtype != first.dtype:
                raise ValueError(f"{names[slot.parameter]} is {parameter.dtype}, others of its buffer {first.dtype}")
            view = self.parameters[slot.start : slot.end].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
            self.module_parameters[slot.parameter] = parameter
            self._gradient_views[slot.parameter] = self.gradients[slot.start : slot.end].view(parameter.shape)
        self.runs = _runs(plan, family, dp_rank)
        self.masters = {run.name: self._master(run) for run in self.runs}

    def accumulate(self, parameter: int) -> None:
        """Add the parameter's fresh gradient to its fp32 sum and free it."""
        module_parameter = self.module_parameters[parameter]
        assert module_parameter.grad is not None, "called from the hook that follows its accumulation"
        self._gradient_views[parameter].add_(module_parameter.grad)
        module_parameter.grad = None

    def bind(self, flat: Tensor) -> None:
        """Let the module compute with ``flat``, another version of this buffer; ``parameters`` itself stays the newest.

        No graph may be in flight over a change: autograd does not see it.
        """
        for slot in self.family.slots:
            parameter = self.module_parameters[slot.parameter]
            parameter.data = flat[slot.start : slot.end].view(parameter.shape)

    def gradient(self, start: int, end: int) -> Tensor:
        """Return the view of the gradients in ``[start, end)``."""
        return self.gradients[start:end]

    def publish(self, run: Run) -> None:
        """Round this rank's master of ``run`` into the parameter buffer (nothing to do for fp32 parameters)."""
        if self.parameters.dtype != torch.float32:
            self.parameters[run.start : run.end].copy_(self.masters[run.name])

    def _master(self, run: Run) -> Tensor:
        view = self.parameters[run.start : run.end]
        return view if view.dtype == torch.float32 else view.float()

    def master_bytes(self) -> int:
        """Bytes of the fp32 values that this rank's updates apply to."""
        return sum(4 * m.numel() for m in self.masters.values())


def _runs(plan: Plan, family: Family, rank: int) -> tuple[Run, ...]:
    if family.atomic:
        return tuple(Run(plan.parameters[p.parameter].name, p.start, p.end, p.parameter) for p in family.pieces(rank))
    spans: list[list[int]] = []
    for bucket in family.buckets:
        neighbour = False
        for slot in bucket.slots:
            owned = owned_range(bucket, slot, rank)
            if owned and neighbour:
                spans[-1][1] = owned[1]
            elif owned:
                spans.append(list(owned))
            neighbour = owned is not None
    return tuple(Run(f"{family.name}:{low}-{high}", low, high, None) for low, high in spans)
