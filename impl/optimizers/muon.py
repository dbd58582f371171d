"""Muon: momentum, orthogonalised by Newton-Schulz (Jordan et al., 2024).  State: one fp32 momentum a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from impl.optimizers.base import HyperParameters, Optimizer, Shape, State, Work, numel, register
from impl.optimizers.eigenbasis import worst
from impl.optimizers.newton_schulz import COEFFICIENT_SETS, orthogonalize_many

SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda m, n: math.sqrt(max(1.0, m / n)),
    "match-rms": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral": lambda m, n: math.sqrt(max(m, n)),
    "none": lambda m, n: 1.0,
}
"""Factor of the update of a whole ``[m, n]`` matrix, by name.

``original``: Jordan's.  ``match-rms``: the root mean square of AdamW's updates (Moonlight, arXiv 2502.16982), so both
optimizers share a learning rate.  ``spectral``: Megatron-LM's default, ``match-rms`` without the 0.2.
"""

ORTHOGONALITY_LIMIT = 1.1
"""Of :meth:`Muon.health`.

Five steps of the ``simple`` set take singular values s above a hundredth of the norm to about 0.7 .. 1.2, for which
``|s^2 - 1|`` is below 0.52.  Gradients also have smaller ones, which stay smaller and may leave anything up to 1, a
direction without an update: 0.65 to 0.92 were seen in healthy training of a small transformer.  So only values above 1
tell something: the iteration has blown up (s above 1.45) or is not finite.
"""


class MuonHyper(HyperParameters):
    """Settings of Muon.

    momentum: factor of the exponential moving average ``m <- momentum m + (1 - momentum) g``.
    nesterov: orthogonalise ``(1 - momentum) g + momentum m`` instead of ``m``.
    ns_steps: Newton-Schulz steps; coefficients: a name in ``COEFFICIENT_SETS``, used in order, the last one repeated.
    scale: a name in ``SCALES``.
    ns_dtype: precision of the iteration; the momentum and the normalisation have the gradient's at least.
    """

    momentum: float = Field(default=0.95, ge=0.0, lt=1.0)
    nesterov: bool = True
    ns_steps: int = Field(default=5, gt=0)
    coefficients: Literal["simple", "quintic", "polar-express", "aol", "qwen-express"] = "simple"
    scale: Literal["original", "match-rms", "spectral", "none"] = "match-rms"
    ns_dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"


@register("muon")
class Muon(Optimizer):
    """Muon on one whole matrix.  The update does not change when all gradients are scaled by one factor."""

    atomic = True
    scale_invariant = True
    cost_formula = "ns_steps (4 max(m, n) min(m, n)^2 + 2 min(m, n)^3)"
    health_metrics = MappingProxyType({"orthogonality": ORTHOGONALITY_LIMIT})
    Hyper = MuonHyper

    @property
    def settings(self) -> MuonHyper:
        """The hyper-parameters, typed."""
        return cast(MuonHyper, self.hyper)

    def init_state(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> State:
        """Return ``{"momentum": zeros}`` for a matrix; raises ValueError for any other ``shape``."""
        _require_matrix(shape)
        return {"momentum": torch.zeros(shape, dtype=dtype, device=device)}

    def update(self, grad: Tensor, state: State, step: int) -> Tensor:
        """Return ``scale(m, n) * orthogonalize(momentum)`` for the gradient ``[m, n]``; ``step`` is not used."""
        return self.update_many([grad], [state], step)[0]

    @torch.no_grad()
    def update_many(self, grads: Sequence[Tensor], states: Sequence[State], step: int) -> list[Tensor]:
        """Return what :meth:`update` would; Newton-Schulz is batched where that pays and changes no bits."""
        hyper, directions = self.settings, []
        for grad, state in zip(grads, states, strict=True):
            _require_matrix(tuple(grad.shape))
            momentum = state["momentum"].lerp_(grad, 1.0 - hyper.momentum)
            directions.append(grad.lerp(momentum, hyper.momentum) if hyper.nesterov else momentum)
        dtype: torch.dtype = getattr(torch, hyper.ns_dtype)
        found = orthogonalize_many(directions, COEFFICIENT_SETS[hyper.coefficients], hyper.ns_steps, dtype)
        return [x.to(g.dtype).mul_(SCALES[hyper.scale](*g.shape)) for x, g in zip(found, grads, strict=True)]

    @torch.no_grad()
    def health(self, state: State, update: Tensor) -> dict[str, float]:
        """Return ``orthogonality``: the largest element of ``|Q Q^T - I|``, Q the update without its scale.

        On the smaller side of the matrix.  0 for an update of exact zero; of low rank it is near 1.
        """
        x = update / SCALES[self.settings.scale](*update.shape)
        gram = x.mT @ x if x.shape[0] > x.shape[1] else x @ x.mT
        gram.diagonal().sub_(1.0)
        return {"orthogonality": worst([float(gram.abs().amax()) if update.any() else 0.0])}

    def flops(self, shape: Shape) -> float:
        """Return ``K (4 max min^2 + 2 min^3)``, the products of K Newton-Schulz steps; 0 if not a matrix."""
        if len(shape) != 2:
            return 0.0
        large, small = max(shape), min(shape)
        return float(self.settings.ns_steps * (4 * large * small**2 + 2 * small**3))

    def published_flops(self, shape: Shape) -> float:
        """Return Canzona's ``4 K max min^2``, without the square of the Gram matrix; 0 if not a matrix."""
        if len(shape) != 2:
            return 0.0
        return float(self.settings.ns_steps * 4 * max(shape) * min(shape) ** 2)

    def state_bytes(self, shape: Shape) -> int:
        """Return 4 bytes an element: the momentum."""
        return 4 * numel(shape)

    def work(self, shape: Shape) -> Work:
        """Return the products of Newton-Schulz in ``ns_dtype``; everything else takes 60 bytes an element."""
        products = {self.settings.ns_dtype: self.flops(shape)}
        return Work(products=products, passes=60.0 * numel(shape), kernels=14 + 3 * self.settings.ns_steps)


def _require_matrix(shape: Shape) -> None:
    if len(shape) != 2:
        raise ValueError(f"muon updates matrices, not a tensor of shape {shape}: route it to adamw")
