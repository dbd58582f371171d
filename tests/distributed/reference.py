"""The slow, obviously right twin of the engine: one process, whole tensors, one parameter after the other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from impl.canzona.engine import EngineOptions
from impl.models.parameters import ParamSpec
from impl.models.sharding import shard
from impl.optimizers.base import Optimizer


def rows_of(spec: ParamSpec) -> list[list[int] | slice]:
    """Return the rows of each logical matrix."""
    named = [[row for start, stop in f.rows for row in range(start, stop)] for f in spec.fragments]
    return list(named) or [slice(None)]


class Reference:
    """Steps whole fp32 parameters on the gradients of all DP ranks, summed in rank order."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        specs: Sequence[ParamSpec],
        optimizers: Mapping[str, Optimizer],
        options: EngineOptions,
        tp: int,
    ) -> None:
        self.parameters = {name: p.clone() for name, p in parameters.items()}
        self.specs, self.optimizers, self.options, self.tp = specs, optimizers, options, tp
        self.states = {
            s.name: [optimizers[s.name].init_state(shape, torch.device("cpu")) for shape in s.matrices] for s in specs
        }
        self.steps = 0

    def step(self, gradients: Sequence[Mapping[str, Tensor]], lr: float) -> float:
        """Apply one step; ``gradients[r]`` are DP rank r's.  Returns the norm."""
        self.steps += 1
        scale = 1.0 / len(gradients)
        summed = {}
        for spec in self.specs:
            total = gradients[0][spec.name] * scale
            for other in gradients[1:]:
                total = total + other[spec.name] * scale
            summed[spec.name] = total
        norm = self.norm(summed)
        clip = min(1.0, self.options.clip / (norm + 1e-6)) if self.options.clip else 1.0
        for spec in self.specs:
            optimizer, g = self.optimizers[spec.name], summed[spec.name]
            if not optimizer.scale_invariant and clip != 1.0:
                g = g * clip
            update = torch.empty_like(g)
            for rows, state in zip(rows_of(spec), self.states[spec.name], strict=True):
                update[rows] = optimizer.update(g[rows].contiguous(), state, self.steps)
            p = self.parameters[spec.name]
            p.mul_(1.0 - lr * self.options.weight_decay).add_(update, alpha=-lr)
        return norm

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Squares of elementwise parameters are added exactly; a matrix is one float64 sum per TP shard."""
        terms: list[float] = []
        for spec in self.specs:
            g = gradients[spec.name]
            if self.optimizers[spec.name].atomic:
                for rank in range(self.tp) if spec.tp_dim is not None else range(1):
                    local = shard(g, spec, self.tp, rank).double()
                    parts = local.tensor_split(2) if [f.name for f in spec.fragments] == ["gate", "up"] else [local]
                    terms += [float(part.square().sum()) for part in parts]
            else:
                terms += g.double().square().flatten().tolist()
        return math.sqrt(math.fsum(terms))
