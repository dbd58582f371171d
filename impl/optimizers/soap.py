"""SOAP (Vyas et al., arXiv 2409.11321): Adam in the eigenbasis of Shampoo's two covariances.

As in the authors' code with a cap on the side, without merged dimensions.  State, fp32: momentum and second moment, and
for each side within the cap its covariance and its basis, and two counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, cast

import torch
from pydantic import Field
from torch import Tensor

from impl.optimizers import batching, eigenbasis
from impl.optimizers.base import HyperParameters, Optimizer, Shape, State, Work, numel, register
from impl.optimizers.eigenbasis import Block

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class SoapHyper(HyperParameters):
    """Settings of SOAP.

    betas: decay of the first and second moment.  eps: added to the root of the uncorrected second moment.
    shampoo_beta: decay of the covariances, None for the second of ``betas``.
    period: steps between refreshes of the bases.  max_side: a longer side is not rotated.
    """

    betas: tuple[Beta, Beta] = (0.95, 0.95)
    eps: float = Field(default=1e-8, gt=0.0)
    shampoo_beta: Beta | None = None
    period: int = Field(default=10, ge=1)
    max_side: int = Field(default=10000, ge=1)


@register("soap")
class Soap(Optimizer):
    """SOAP on one whole matrix.  The first step only builds the bases: its update is zero.

    Of the solver the state counts ``failures``, refreshes of a side in which its basis stayed as it was, and
    ``fallbacks``, those that took float64.
    """

    atomic = True
    scale_invariant = False
    counters = ("failures", "fallbacks")
    cost_formula = "per side q <= max_side: 8 q m n + 22/3 q^3 / period"
    health_metrics = MappingProxyType({"orthogonality": 1e-3, "condition": eigenbasis.CONDITION_LIMIT})
    Hyper = SoapHyper

    @property
    def settings(self) -> SoapHyper:
        """The hyper-parameters, typed."""
        return cast(SoapHyper, self.hyper)

    def init_state(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> State:
        """Return zero moments and covariances and identity bases; raises ValueError unless ``shape`` is a matrix."""
        state = {name: torch.zeros(shape, dtype=dtype, device=device) for name in ("momentum", "second")}
        for block in self._blocks(shape):
            state[f"factor.{block.key}"] = torch.zeros(block.size, block.size, dtype=dtype, device=device)
            state[f"basis.{block.key}"] = torch.eye(block.size, dtype=dtype, device=device)
        return state | {name: torch.zeros((), dtype=dtype, device=device) for name in self.counters}

    def update(self, grad: Tensor, state: State, step: int) -> Tensor:
        """Return ``U D V^T sqrt(1 - b2^t) / (1 - b1^t)`` with ``D = U^T M V / (sqrt(S) + eps)``, t = ``step`` - 1.

        U and V are those before this gradient: covariances, and every ``period`` steps the bases with the order of S,
        follow after.  A basis that no solver can refresh stays as it is.
        """
        return self.update_many([grad], [state], step)[0]

    @torch.no_grad()
    def update_many(self, grads: Sequence[Tensor], states: Sequence[State], step: int) -> list[Tensor]:
        """Return what :meth:`update` would, equal shapes batched where that keeps their bits."""
        keys = [batching.key(index, grad, self._sides(grad)) for index, grad in enumerate(grads)]
        return batching.in_batches(partial(self._advance, step=step), keys, grads, states)

    def _sides(self, grad: Tensor) -> list[int]:
        return [*grad.shape, *(block.size for block in self._blocks(tuple(grad.shape)))]

    def _advance(self, gradients: Tensor, states: Sequence[State], step: int) -> Tensor:
        """Advance the equal-shaped ``states`` by their gradients ``[b, m, n]`` and return the updates."""
        parts = self._blocks(tuple(gradients.shape[1:]))
        updates = self._step(gradients, states, step - 1, parts) if step > 1 else torch.zeros_like(gradients)
        self._follow(gradients, states, step - 1, parts)
        return updates

    def _step(self, gradients: Tensor, states: Sequence[State], t: int, parts: Sequence[Block]) -> Tensor:
        beta1, beta2 = self.settings.betas
        bases = [torch.stack([s[f"basis.{block.key}"] for s in states]) for block in parts]
        rotated = eigenbasis.rotate(gradients, parts, bases)
        for gradient, turned, state in zip(gradients, rotated, states, strict=True):
            state["momentum"].lerp_(gradient, 1.0 - beta1)
            state["second"].mul_(beta2).addcmul_(turned, turned, value=1.0 - beta2)
        momentum = eigenbasis.rotate(torch.stack([s["momentum"] for s in states]), parts, bases)
        if parts:
            eigenbasis.drop_rounding(momentum)  # what gradients of low rank leave in a null space is nothing else
        direction = momentum / torch.stack([s["second"] for s in states]).sqrt_().add_(self.settings.eps)
        direction.mul_(math.sqrt(1.0 - beta2**t) / (1.0 - beta1**t))
        return eigenbasis.rotate(direction, parts, bases, back=True)

    def _follow(self, gradients: Tensor, states: Sequence[State], t: int, parts: Sequence[Block]) -> None:
        """Let covariances and, at step 1 and when t is a multiple of the period, bases follow the gradients."""
        beta = self.settings.betas[1] if self.settings.shampoo_beta is None else self.settings.shampoo_beta
        for block in parts:
            covariances = eigenbasis.covariance(block.upright(gradients))
            for state, covariance in zip(states, covariances, strict=True):
                state[f"factor.{block.key}"].lerp_(covariance, 1.0 - beta)
            if t % self.settings.period == 0:
                self._refresh(states, block, first=t == 0)

    def _refresh(self, states: Sequence[State], block: Block, *, first: bool) -> None:
        factor = torch.stack([s[f"factor.{block.key}"] for s in states])
        second = torch.stack([s["second"] for s in states])
        if first:
            found = eigenbasis.solve(eigenbasis.eigenvectors, factor)
        else:
            basis = torch.stack([s[f"basis.{block.key}"] for s in states])
            product = eigenbasis.covariance_product(factor, basis)
            order = eigenbasis.column_order(basis, product)
            eigenbasis.permute(second, block, order)
            found = eigenbasis.solve(eigenbasis.orthonormal, eigenbasis.take_columns(product, order))
        for state, solution, permuted in zip(states, found, second, strict=True):
            if eigenbasis.count(state, [solution]) and solution.value is not None:
                state[f"basis.{block.key}"].copy_(solution.value)
                state["second"].copy_(permuted)

    @torch.no_grad()
    def health(self, state: State, update: Tensor) -> dict[str, float]:
        """Return the worst ``orthogonality`` of the bases and ``condition`` of the covariances; an eigvalsh a side."""
        return eigenbasis.health(state, self._blocks(tuple(update.shape)))

    def _blocks(self, shape: Shape) -> tuple[Block, ...]:
        eigenbasis.require_matrix(shape, self.name)
        return eigenbasis.blocks(shape, (0, 1), self.settings.max_side)

    def flops(self, shape: Shape) -> float:
        """Return Canzona's count: per rotated side of length q, ``8 q m n + (6 + 4/3) q^3 / period``.

        0 if not a matrix.  The products are two projections, the way back and the covariance; the refresh is counted as
        their code does it, with ``Q^T A Q``, ``A Q`` and a QR.
        """
        if len(shape) != 2:
            return 0.0
        sides = [block.size for block in self._blocks(shape)]
        return float(sum(8 * q * numel(shape) + (6 + 4 / 3) * q**3 / self.settings.period for q in sides))

    def state_bytes(self, shape: Shape) -> int:
        """Return 8 bytes an element and 8 an element of each rotated side's square, and two counts."""
        sides = [block.size for block in self._blocks(shape)] if len(shape) == 2 else []
        return 8 * numel(shape) + sum(8 * q * q for q in sides) + 4 * len(self.counters)

    def work(self, shape: Shape) -> Work:
        """Return the products as :meth:`update` makes them, the QR with its Q, and 80 bytes an element of passes."""
        sides = [block.size for block in self._blocks(shape)]
        products = sum(8.0 * q * numel(shape) + 2.0 * q**3 / self.settings.period for q in sides)
        qr = sum(8 / 3 * q**3 / self.settings.period for q in sides)
        passes = 80.0 * numel(shape) + sum(12.0 * q * q for q in sides)
        return Work(products={"float32": products}, qr=qr, passes=passes, kernels=30 + 10 * len(sides))
