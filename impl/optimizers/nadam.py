"""NAdam (Dozat, 2016) as in torch.optim.NAdam.  State: two fp32 moments an element and the running product of mu.

With beta1 = 0.99 this is the practical form of asynchronous Nesterov (Ajanthan et al., 2025).  Decoupled weight decay
and the learning rate are the engine's, as for every optimizer here.
"""

from __future__ import annotations

import math
from typing import Annotated, cast

import torch
from pydantic import Field
from torch import Tensor

from impl.optimizers.base import HyperParameters, Optimizer, Shape, State, Work, numel, register

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class NAdamHyper(HyperParameters):
    """Settings of NAdam.

    betas: decay of the first and second moment.  eps: added to the root of the bias-corrected second moment.
    momentum_decay: psi of ``mu_t = beta1 (1 - 0.5 * 0.96^(t psi))``, which grows from beta1 / 2 to beta1.
    """

    betas: tuple[Beta, Beta] = (0.99, 0.999)
    eps: float = Field(default=1e-8, gt=0.0)
    momentum_decay: float = Field(default=0.004, ge=0.0)


@register("nadam")
class NAdam(Optimizer):
    """NAdam, element by element: a flat range gives the same bits as that range of the whole tensor."""

    atomic = False
    scale_invariant = False
    cost_formula = "14 per element"
    Hyper = NAdamHyper

    @property
    def settings(self) -> NAdamHyper:
        """The hyper-parameters, typed."""
        return cast(NAdamHyper, self.hyper)

    def init_state(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> State:
        """Return both moments, zero, and ``mu_product``, the product of mu so far, one."""
        state = {name: torch.zeros(shape, dtype=dtype, device=device) for name in ("first", "second")}
        return state | {"mu_product": torch.ones((), dtype=dtype, device=device)}

    @torch.no_grad()
    def update(self, grad: Tensor, state: State, step: int) -> Tensor:
        """Return ``[(1 - mu_t) g / (1 - c_t) + mu_{t+1} m / (1 - c_t mu_{t+1})] / (sqrt(v / (1 - b2^t)) + eps)``.

        c_t is the product of mu_1 .. mu_t.
        """
        beta1, beta2 = self.settings.betas
        mu, mu_next = self._mu(step), self._mu(step + 1)
        first = state["first"].lerp_(grad, 1.0 - beta1)
        second = state["second"].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        product = state["mu_product"].mul_(mu)
        denominator = second.sqrt().div_(math.sqrt(1.0 - beta2**step)).add_(self.settings.eps)
        direction = grad * ((1.0 - mu) / (1.0 - product)) + first * (mu_next / (1.0 - product * mu_next))
        return direction.div_(denominator)

    def _mu(self, step: int) -> float:
        return self.settings.betas[0] * (1.0 - 0.5 * 0.96 ** (step * self.settings.momentum_decay))

    def flops(self, shape: Shape) -> float:
        """Return 14 operations an element, as :meth:`update` writes them: 3 + 4 for the moments, 7 for the quotient."""
        return 14.0 * numel(shape)

    def state_bytes(self, shape: Shape) -> int:
        """Return 8 bytes an element, two moments, and 4 for the product."""
        return 8 * numel(shape) + 4

    def work(self, shape: Shape) -> Work:
        """Return 100 bytes an element in 14 kernels: each operation reads and writes whole tensors."""
        return Work(passes=100.0 * numel(shape), kernels=14)
