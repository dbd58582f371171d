"""Shampoo (Gupta, Koren, Singer, arXiv 1802.09568): momentum between inverse roots of both sides' statistics.

The statistics are averages instead of sums, as in Distributed Shampoo (Shi et al., arXiv 2309.06497), without blocks.
State, fp32: the momentum, for each preconditioned side its statistics and their root, two counts, and with
``grafting: adam`` a second moment.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated, Literal, cast

import torch
from pydantic import Field, ValidationInfo, field_validator
from torch import Tensor

from impl.optimizers import batching, eigenbasis, inverse_root
from impl.optimizers.base import HyperParameters, Optimizer, Shape, State, Work, numel, register
from impl.optimizers.eigenbasis import Block

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
EIGH_FLOPS = 25
"""Operations of a root by eigendecomposition, per cube of the side: the planner oracle's count."""


class ShampooHyper(HyperParameters):
    """Settings of Shampoo.

    momentum: decay of the average of gradients.  shampoo_beta: decay of the averages of ``G G^T`` and ``G^T G``.
    exponent: the statistics of each of two sides are raised to ``-exponent``; those of a side alone to twice that.
    root: ``eigh``, or ``coupled-newton`` (matrix products alone; 1 / exponent must be an even number).
    ridge: added to the statistics before the root, as a share of their largest eigenvalue.
    period: steps between refreshes of the roots.  They fall on step 1 and where ``step % period == 0``.
    max_side: a longer side is not preconditioned.
    grafting: ``none``; or the update takes the length (Frobenius norm) of that of ``sgd``, the momentum, or of
        ``adam``, with ``graft_beta`` for its second moment and ``graft_eps`` added to the root.
    """

    momentum: Beta = 0.9
    shampoo_beta: Beta = 0.95
    exponent: float = Field(default=0.25, gt=0.0, le=1.0)
    root: Literal["eigh", "coupled-newton"] = "eigh"
    ridge: float = Field(default=1e-6, gt=0.0, lt=1.0)
    period: int = Field(default=10, ge=1)
    max_side: int = Field(default=10000, ge=1)
    grafting: Literal["none", "sgd", "adam"] = "none"
    graft_beta: Beta = 0.95
    graft_eps: float = Field(default=1e-8, gt=0.0)

    @field_validator("root")
    @classmethod
    def _newton_takes_integer_roots(cls, root: str, info: ValidationInfo) -> str:
        exponent = info.data.get("exponent", 0.25)
        halves = 0.5 / exponent
        if root == "coupled-newton" and not math.isclose(halves, round(halves), rel_tol=1e-9):
            raise ValueError(f"coupled-newton needs an exponent of 1 / an even number, such as 0.25, not {exponent}")
        return root


@register("shampoo")
class Shampoo(Optimizer):
    """Shampoo on one whole matrix.

    Where only one side is within ``max_side``, its statistics take both sides' exponents, -1/2 by default: one-sided
    Shampoo, whose update is as independent of the gradient's scale as the two-sided one's.  A matrix of two longer
    sides gets its momentum, or what it is grafted to.

    Of the solver the state counts ``failures``, refreshes of a side in which its root stayed as it was (at first the
    identity), and ``fallbacks``, those that took float64, by eigh in any case.
    """

    atomic = True
    scale_invariant = False  # clipping is to act: a spike would stay in the statistics
    counters = ("failures", "fallbacks")
    cost_formula = (
        "per side a <= max_side against b: 4 a^2 b + 25 a^3 / period,"
        " or 176 a^3 / period by coupled-newton at exponent 0.25"
    )
    health_metrics = MappingProxyType({"condition": 1e8})
    Hyper = ShampooHyper

    @property
    def settings(self) -> ShampooHyper:
        """The hyper-parameters, typed."""
        return cast(ShampooHyper, self.hyper)

    def init_state(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> State:
        """Return zero averages and identity roots; raises ValueError unless ``shape`` is a matrix."""
        names = ("momentum", "second") if self.settings.grafting == "adam" else ("momentum",)
        state = {name: torch.zeros(shape, dtype=dtype, device=device) for name in names}
        for block in self._blocks(shape):
            state[f"factor.{block.key}"] = torch.zeros(block.size, block.size, dtype=dtype, device=device)
            state[f"root.{block.key}"] = torch.eye(block.size, dtype=dtype, device=device)
        return state | {name: torch.zeros((), dtype=dtype, device=device) for name in self.counters}

    def update(self, grad: Tensor, state: State, step: int) -> Tensor:
        """Return ``L M R`` with ``L = (A + r I)^(-exponent)``, and R likewise from the right side.

        M, the average of G, A, that of ``G G^T``, and the second moment of ``adam`` start from zero and are divided by
        ``1 - beta^step``; r is ``ridge`` times A's largest eigenvalue.  All take this gradient in before they are
        used; L and R are of the last refresh.  Without statistics (all gradients were zero, or too small to be
        squared), L and R are the identity.  Statistics and second moment see gradients that are too large to be
        squared scaled down to the largest that are not.
        """
        return self.update_many([grad], [state], step)[0]

    @torch.no_grad()
    def update_many(self, grads: Sequence[Tensor], states: Sequence[State], step: int) -> list[Tensor]:
        """Return what :meth:`update` would, equal shapes batched where that keeps their bits."""
        for grad in grads:
            eigenbasis.require_matrix(tuple(grad.shape), self.name)
        keys = [batching.key(index, grad, grad.shape) for index, grad in enumerate(grads)]
        return batching.in_batches(partial(self._advance, step=step), keys, grads, states)

    def _advance(self, gradients: Tensor, states: Sequence[State], step: int) -> Tensor:
        """Advance the equal-shaped ``states`` by their gradients ``[b, m, n]`` and return the updates."""
        hyper, parts = self.settings, self._blocks(tuple(gradients.shape[1:]))
        for state, gradient in zip(states, gradients, strict=True):
            state["momentum"].lerp_(gradient, 1.0 - hyper.momentum)
        squarable = _squarable(gradients)
        if hyper.grafting == "adam":
            for state, gradient in zip(states, squarable, strict=True):
                state["second"].mul_(hyper.graft_beta).addcmul_(gradient, gradient, value=1.0 - hyper.graft_beta)
        for block in parts:
            covariances = eigenbasis.covariance(block.upright(squarable))
            for state, covariance in zip(states, covariances, strict=True):
                state[f"factor.{block.key}"].lerp_(covariance, 1.0 - hyper.shampoo_beta)
            if step == 1 or step % hyper.period == 0:
                self._refresh(states, block, step, power=hyper.exponent * 2 / len(parts))
        momentum = torch.stack([s["momentum"] for s in states]).div_(1.0 - hyper.momentum**step)
        roots = [torch.stack([s[f"root.{block.key}"] for s in states]) for block in parts]
        update = eigenbasis.rotate(momentum, parts, roots, back=True)
        return update if hyper.grafting == "none" else _graft(update, self._graft_to(momentum, states, step))

    def _refresh(self, states: Sequence[State], block: Block, step: int, power: float) -> None:
        hyper = self.settings
        factor = torch.stack([s[f"factor.{block.key}"] for s in states]).div_(1.0 - hyper.shampoo_beta**step)
        root = partial(inverse_root.ROOTS[hyper.root], power=power, ridge=hyper.ridge)
        rescue = partial(inverse_root.by_eigh, power=power, ridge=hyper.ridge) if hyper.root != "eigh" else None
        for state, solution in zip(states, eigenbasis.solve(root, factor, rescue), strict=True):
            if eigenbasis.count(state, [solution]) and solution.value is not None:
                state[f"root.{block.key}"].copy_(solution.value)

    def _graft_to(self, momentum: Tensor, states: Sequence[State], step: int) -> Tensor:
        """Return the updates ``[b, m, n]`` whose lengths ours take."""
        if self.settings.grafting == "sgd":
            return momentum
        second = torch.stack([s["second"] for s in states]).div_(1.0 - self.settings.graft_beta**step)
        return momentum / second.sqrt_().add_(self.settings.graft_eps)

    @torch.no_grad()
    def health(self, state: State, update: Tensor) -> dict[str, float]:
        """Return ``condition``, that of the statistics with their ridge, the larger one; an eigvalsh a side."""
        factors = [state[f"factor.{block.key}"] for block in self._blocks(tuple(update.shape))]
        conditions = [eigenbasis.condition(factor, self.settings.ridge) for factor in factors]
        return {"condition": eigenbasis.worst([1.0, *conditions])}

    def _blocks(self, shape: Shape) -> tuple[Block, ...]:
        eigenbasis.require_matrix(shape, self.name)
        return eigenbasis.blocks(shape, (0, 1), self.settings.max_side)

    def flops(self, shape: Shape) -> float:
        """Return per preconditioned side of length a against b: ``4 a^2 b``, and its root every ``period`` steps.

        0 if not a matrix.  The products are the statistics and the preconditioning; a root takes ``25 a^3`` by eigh.
        """
        if len(shape) != 2:
            return 0.0
        parts, hyper, total = self._blocks(shape), self.settings, 0.0
        for block in parts:
            a, b = block.size, shape[1 - block.axis]
            root = EIGH_FLOPS * a**3
            if hyper.root == "coupled-newton":
                root = inverse_root.newton_flops(a, hyper.exponent * 2 / len(parts))
            total += 4 * a * a * b + root / hyper.period
        return total

    def work(self, shape: Shape) -> Work:
        """Return statistics and preconditioning as products, roots by their solver, 50 bytes an element of passes."""
        hyper, parts = self.settings, self._blocks(shape)
        elements = math.prod(shape)
        products = sum(4.0 * block.size * elements for block in parts)
        roots = self.flops(shape) - products
        newton = hyper.root == "coupled-newton"
        return Work(
            products={"float32": products + (roots if newton else 0.0)},
            eigh=0.0 if newton else roots,
            passes=50.0 * elements + sum(12.0 * block.size**2 for block in parts),
            kernels=20 + 15 * len(parts),
        )

    def state_bytes(self, shape: Shape) -> int:
        """Return 4 bytes an element (8 for ``grafting: adam``), 8 an element of each side's square, and two counts."""
        sides = [block.size for block in self._blocks(shape)] if len(shape) == 2 else []
        moments = 2 if self.settings.grafting == "adam" else 1
        return 4 * moments * numel(shape) + sum(8 * q * q for q in sides) + 4 * len(self.counters)


def _squarable(gradients: Tensor) -> Tensor:
    """Return ``[b, m, n]``, each matrix scaled down to where sums of squares stay finite, if it has to be."""
    limit = math.sqrt(torch.finfo(gradients.dtype).max / (4 * max(gradients.shape[1:])))
    peak = gradients.abs().amax((-2, -1), keepdim=True)
    return gradients * (limit / peak).clamp_max_(1.0)  # limit / 0 is infinite, and clamped


def _graft(updates: Tensor, models: Tensor) -> Tensor:
    """Return ``updates`` ``[b, m, n]`` with the Frobenius norms of ``models``; zero stays zero."""
    ours, theirs = _norms(updates), _norms(models)
    return updates * torch.where(ours == 0, 0.0, theirs / torch.where(ours == 0, 1.0, ours))


def _norms(batch: Tensor) -> Tensor:
    """Return Frobenius norms ``[b, 1, 1]``: matrix by matrix, and of elements divided by the largest."""
    peak = batch.abs().amax((-2, -1), keepdim=True)
    scaled = batch / torch.where(peak == 0, 1.0, peak)
    return torch.stack([torch.linalg.vector_norm(matrix) for matrix in scaled]).view(-1, 1, 1) * peak
