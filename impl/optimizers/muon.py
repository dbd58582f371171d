"""Muon: momentum, orthogonalised by Newton-Schulz (Jordan et al., 2024).  State: one fp32 momentum a matrix."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from impl.optimizers.base import HyperParameters, Optimizer, Shape, State, numel, register
from impl.optimizers.newton_schulz import COEFFICIENT_SETS, orthogonalize

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


class MuonHyper(HyperParameters):
    """Settings of Muon.

    momentum: factor of the exponential moving average ``m <- momentum m + (1 - momentum) g``.
    nesterov: orthogonalise ``(1 - momentum) g + momentum m`` instead of ``m``.
    ns_steps: Newton-Schulz steps; coefficients: a name in ``COEFFICIENT_SETS``, used in order, the last one repeated.
    scale: a name in ``SCALES``.
    ns_dtype: precision of the iteration; the momentum and the normalisation are fp32 at least.
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
    Hyper = MuonHyper

    @property
    def settings(self) -> MuonHyper:
        """The hyper-parameters, typed."""
        return cast(MuonHyper, self.hyper)

    def init_state(self, shape: Shape, device: torch.device) -> State:
        """Return ``{"momentum": zeros}`` for a matrix; raises ValueError for any other ``shape``."""
        _require_matrix(shape)
        return {"momentum": torch.zeros(shape, dtype=torch.float32, device=device)}

    @torch.no_grad()
    def update(self, grad: Tensor, state: State, step: int) -> Tensor:
        """Return ``scale(m, n) * orthogonalize(momentum)`` for the gradient ``[m, n]``; ``step`` is not used."""
        _require_matrix(tuple(grad.shape))
        hyper = self.settings
        momentum = state["momentum"].lerp_(grad, 1.0 - hyper.momentum)
        direction = grad.lerp(momentum, hyper.momentum) if hyper.nesterov else momentum
        dtype: torch.dtype = getattr(torch, hyper.ns_dtype)
        x = orthogonalize(direction, COEFFICIENT_SETS[hyper.coefficients], hyper.ns_steps, dtype)
        return x.to(torch.float32).mul_(SCALES[hyper.scale](*grad.shape))

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


def _require_matrix(shape: Shape) -> None:
    if len(shape) != 2:
        raise ValueError(f"muon updates matrices, not a tensor of shape {shape}: route it to adamw")
