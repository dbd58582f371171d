"""AdamW (Loshchilov and Hutter, 2019).  State: two fp32 moments an element.

Decoupled weight decay and the learning rate are the engine's, as for every optimizer here.
"""

from __future__ import annotations

import math
from typing import Annotated, cast

import torch
from pydantic import Field
from torch import Tensor

from impl.optimizers.base import HyperParameters, Optimizer, Shape, State, Work, numel, register

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class AdamWHyper(HyperParameters):
    """Settings of AdamW.

    betas: decay of the first and second moment.  eps: added to the root of the bias-corrected second moment.
    """

    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0)


@register("adamw")
class AdamW(Optimizer):
    """AdamW, element by element: a flat range gives the same bits as that range of the whole tensor."""

    atomic = False
    scale_invariant = False
    cost_formula = "12 per element"
    Hyper = AdamWHyper

    @property
    def settings(self) -> AdamWHyper:
        """The hyper-parameters, typed."""
        return cast(AdamWHyper, self.hyper)

    def init_state(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> State:
        """Return both moments, zero."""
        return {name: torch.zeros(shape, dtype=dtype, device=device) for name in ("first", "second")}

    @torch.no_grad()
    def update(self, grad: Tensor, state: State, step: int) -> Tensor:
        """Return ``m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)`` in the order of operations of torch.optim.AdamW."""
        beta1, beta2 = self.settings.betas
        first = state["first"].lerp_(grad, 1.0 - beta1)
        second = state["second"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        denominator = second.sqrt().div_(math.sqrt(1.0 - beta2**step)).add_(self.settings.eps)
        return torch.div(first, denominator, out=denominator).div_(1.0 - beta1**step)

    def flops(self, shape: Shape) -> float:
        """Return 12 operations an element, as :meth:`update` writes them: 3 + 4 for the moments, 5 for the quotient."""
        return 12.0 * numel(shape)

    def state_bytes(self, shape: Shape) -> int:
        """Return 8 bytes an element: two moments."""
        return 8 * numel(shape)

    def work(self, shape: Shape) -> Work:
        """Return 80 bytes an element in 8 kernels: each operation of :meth:`update` reads and writes whole tensors."""
        return Work(passes=80.0 * numel(shape), kernels=8)
