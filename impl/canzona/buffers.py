"""The flat buffers: parameters and gradients of one family, and what this rank owns of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby, zip_longest

import torch
from torch import Tensor, nn

from impl.canzona.plan import Bucket, Family, Plan, owned_range


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

    module_parameters: by the index of the parameter in the plan, of the first block where the plan splits it.
    """

    def __init__(self, plan: Plan, family: Family, modules: Mapping[str, nn.Parameter], dp_rank: int) -> None:
        self.family = family
        by_module = [
            (name, list(slots))
            for name, slots in groupby(family.slots, key=lambda slot: plan.parameters[slot.parameter].module)
        ]
        first = modules[by_module[0][0]]
        self.parameters = torch.zeros(family.numel, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(family.numel, dtype=torch.float32, device=first.device)
        self.module_parameters: dict[int, nn.Parameter] = {}
        self._spans: dict[int, tuple[int, int]] = {}
        self._key_of: dict[int, int] = {}
        for name, slots in by_module:
            parameter, key = modules[name], slots[0].parameter
            if parameter.dtype != first.dtype:
                raise ValueError(f"{name} is {parameter.dtype}, others of its buffer {first.dtype}")
            self._spans[key] = slots[0].start, slots[-1].end
            view = self._view(self.parameters, key, parameter)
            view.copy_(parameter.data)
            parameter.data = view
            self.module_parameters[key] = parameter
            self._key_of |= {slot.parameter: key for slot in slots}
        self._gradient_views = {k: self._view(self.gradients, k, p) for k, p in self.module_parameters.items()}
        self.runs = runs_of(plan, family, dp_rank)
        self.masters = {run.name: self._master(run) for run in self.runs}

    def keys(self, bucket: Bucket) -> set[int]:
        """Return the keys of the module parameters in ``bucket``."""
        return {self._key_of[slot.parameter] for slot in bucket.slots}

    def _view(self, flat: Tensor, key: int, parameter: nn.Parameter) -> Tensor:
        start, end = self._spans[key]
        return flat[start:end].view(parameter.shape)

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
        for key, parameter in self.module_parameters.items():
            parameter.data = self._view(flat, key, parameter)

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


def runs_of(plan: Plan, family: Family, rank: int) -> tuple[Run, ...]:
    """Return what DP rank ``rank`` updates of ``family``, by rising position."""
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


def trainable(model: nn.Module, plan: Plan) -> dict[str, nn.Parameter]:
    """Return the plan's parameters of ``model``; raises ``ValueError`` unless they are its trainable ones, in order."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    planned = []
    for name, group in groupby(plan.parameters, key=lambda spec: spec.module):
        shapes = [spec.local_shape(plan.tp) for spec in group]
        planned.append((name, (sum(s[0] for s in shapes), *shapes[0][1:]) if shapes[0] else ()))
    actual = [(name, tuple(p.shape)) for name, p in found.items()]
    for want, have in zip_longest(planned, actual):
        if want != have:
            raise ValueError(f"plan and model disagree: planned {want}, found {have}")
    return found
