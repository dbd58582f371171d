"""A module whose gradients are given from outside, so that the step is tested apart from any model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from impl.models.parameters import ParamSpec
from impl.models.sharding import shard


class Toy(nn.Module):
    """Holds TP shards of whole tensors; ``loss(g) = sum <p, g>`` has gradient g."""

    def __init__(self, whole: Mapping[str, Tensor], specs: Sequence[ParamSpec], tp: int, tp_rank: int,
                 dtype: torch.dtype = torch.float32) -> None:  # fmt: skip
        super().__init__()
        self.specs, self.tp, self.tp_rank = specs, tp, tp_rank
        for spec in specs:
            child = nn.Module()
            child.weight = nn.Parameter(shard(whole[spec.name], spec, tp, tp_rank).clone().to(dtype))
            child.forward = lambda child=child: child.weight  # type: ignore[method-assign]
            self.add_module(spec.name.removesuffix(".weight"), child)

    def loss(self, gradients: Mapping[str, Tensor], skip: Sequence[str] = ()) -> Tensor:
        """Return ``sum <p, g>`` over this rank's shards; parameters in ``skip`` take no part."""
        total = torch.zeros(())
        for spec in self.specs:
            child = self.get_submodule(spec.name.removesuffix(".weight"))
            weight = child()  # through the forward, so that it waits for its bucket
            if spec.name in skip or not weight.requires_grad:
                continue
            gradient = shard(gradients[spec.name], spec, self.tp, self.tp_rank)
            if spec.partial_over_tp:
                gradient = gradient / self.tp  # exact for the powers of two used here
            total = total + (weight.float() * gradient).sum()
        return total

    def local(self) -> dict[str, Tensor]:
        return {spec.name: self.get_parameter(spec.name).detach().clone() for spec in self.specs}


def specs_mixed() -> list[ParamSpec]:
    """Fused and plain matrices, odd shapes, vectors cut and replicated; TP 1 and 2 divide what they cut."""
    return [
        ParamSpec("embedding.weight", (37, 6)),
        ParamSpec("a_proj.weight", (6, 10), tp_dim=1),
        ParamSpec("a_qkv.weight", (14, 6), tp_dim=0),
        ParamSpec("a_norm.weight", (6,)),
        ParamSpec("a_qnorm.weight", (5,), partial_over_tp=True),
        ParamSpec("a_fc1.weight", (16, 6), tp_dim=0, blocks=(8, 8)),
        ParamSpec("a_fc2.weight", (6, 8), tp_dim=1),
        ParamSpec("b_proj.weight", (6, 10), tp_dim=1),
        ParamSpec("b_odd.weight", (3, 7)),
        ParamSpec("b_fc1.weight", (24, 6), tp_dim=0, blocks=(12, 12)),
        ParamSpec("b_row.weight", (1, 9)),
        ParamSpec("b_norm.weight", (6,)),
        ParamSpec("head.weight", (38, 6), tp_dim=0),
    ]


ELEMENTWISE = ("embedding", "head", "norm", "qnorm")


def is_matrix(spec: ParamSpec) -> bool:
    return not any(word in spec.name for word in ELEMENTWISE)


def random_tensors(specs: Sequence[ParamSpec], *key: int, scale: float = 1.0) -> dict[str, Tensor]:
    seed = 0
    for part in key:
        seed = seed * 1009 + part
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator) * scale for s in specs}
