"""Basis rotation (Jung, Shin, Lee, arXiv 2602.03515): Adam in an estimate of the Hessian's eigenbasis.

Weights, gradients and momentum stay as they are; only the second moment lives in the rotated space.  The 1st source is
not the released one, which sorts one side by the order of the other: here each side follows ``M M^T`` or ``M^T M``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import MappingProxyType
from typing import Annotated, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from impl.optimizers import batching, eigenbasis
from impl.optimizers.base import HyperParameters, Optimizer, Shape, State, Work, numel, register
from impl.optimizers.eigenbasis import Block, Solution

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
COUNTERS = ("skipped", "failures", "fallbacks", "refreshes", "offset")
"""Scalars of the state: four counts, and the offset of the refreshes."""


class BasisRotationHyper(HyperParameters):
    """Settings of basis rotation.

    source: what the bases follow, ``2nd`` averaged ``G G^T`` and ``G^T G`` (kept in the state), ``1st`` the momentum.
    geometry: ``bilateral`` rotates both sides, ``unilateral`` the shorter one (the right one of a square matrix).
    period: steps between refreshes (K).  They fall on step 1 and where ``(step + offset) % period == 0``.
    offset: see period.  stagger: matrix j refreshes at steps j mod period instead of all at once.
    betas: decay of the first and second moment.  eps: added to the root of the uncorrected second moment.
    shampoo_beta: decay of ``G G^T`` and ``G^T G``, None for the second of ``betas``.
    nesterov: see :meth:`BasisRotation.update`.
    gain: factor of the update, 1 in the paper: a learning rate of its own for rotated matrices.
    basis_dtype: precision the bases are stored in between refreshes, ``float32`` for that of the rest of the state; all
        computation is in the precision of the gradients, fp32 or fp64.
    max_side: a longer side is ``beyond`` it and stays ``unrotated``, or is rotated in diagonal ``blocks`` of that size.
    """

    source: Literal["1st", "2nd"] = "2nd"
    geometry: Literal["bilateral", "unilateral"] = "bilateral"
    period: int = Field(default=10, ge=1)
    offset: int = Field(default=0, ge=0)
    stagger: bool = False
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(default=1e-8, gt=0.0)
    shampoo_beta: Beta | None = None
    nesterov: bool = False
    gain: float = Field(default=1.0, gt=0.0)
    basis_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    max_side: int = Field(default=10000, ge=1)
    beyond: Literal["unrotated", "blocks"] = "unrotated"


@register("basis-rotation")
class BasisRotation(Optimizer):
    """Basis rotation of one whole matrix.

    State: ``momentum``, ``second`` (rotated); for each block of a rotated side ``basis.*`` and, with the 2nd source,
    ``factor.*``; and five scalars: ``skipped`` gradients that were not finite, ``failures`` of the solver and
    ``fallbacks`` to float64, ``refreshes`` of the bases, and the ``offset`` of the refreshes.

    The second moment is permuted but not carried over when a basis turns.  After the first step it is diagonal, so with
    a period of 1 the second update is some ten times larger than usual: warm the learning rate up.
    """

    atomic = True
    scale_invariant = False
    counters = ("skipped", "failures", "fallbacks")
    cost_formula = (
        "12 m n + per rotated side q against k: 6 q^2 k + (source 2nd) 2 q^2 k + (2 q^3 + 8/3 q^3) / period"
        " or (source 1st) (4 q^2 k + 8/3 q^3) / period"
    )
    health_metrics = MappingProxyType({"orthogonality": 1e-2, "condition": eigenbasis.CONDITION_LIMIT})
    Hyper = BasisRotationHyper

    @property
    def settings(self) -> BasisRotationHyper:
        """The hyper-parameters, typed."""
        return cast(BasisRotationHyper, self.hyper)

    def init_state(self, shape: Shape, device: torch.device, dtype: torch.dtype = torch.float32) -> State:
        """Return zero moments and factors and identity bases; raises ValueError unless ``shape`` is a matrix."""
        stored = self._stored(dtype)
        state = {name: torch.zeros(shape, dtype=dtype, device=device) for name in ("momentum", "second")}
        for block in self._blocks(shape):
            state[f"basis.{block.key}"] = torch.eye(block.size, dtype=stored, device=device)
            if self.settings.source == "2nd":
                state[f"factor.{block.key}"] = torch.zeros(block.size, block.size, dtype=dtype, device=device)
        state |= {name: torch.zeros((), dtype=dtype, device=device) for name in COUNTERS}
        state["offset"].fill_(self.settings.offset % self.settings.period)
        return state

    def _stored(self, dtype: torch.dtype) -> torch.dtype:
        """Return the precision of the bases in a state of ``dtype``."""
        name = self.settings.basis_dtype
        return dtype if name == "float32" else getattr(torch, name)

    def place(self, state: State, index: int) -> None:
        """With ``stagger``, let the state of matrix ``index`` refresh at steps ``index - offset`` modulo the period."""
        if self.settings.stagger:
            state["offset"].fill_((self.settings.offset - index) % self.settings.period)

    def update(self, grad: Tensor, state: State, step: int) -> Tensor:
        """Return ``U D V^T sqrt(1 - b2^t) / (1 - b1^t)`` with ``D = U^T M V / (sqrt(S) + eps)``.

        M, the averaged ``G G^T`` and ``G^T G``, and the bases take this gradient in before they are used.  With
        ``nesterov`` the step looks one gradient ahead, as NAdam with a constant mu: ``N = b1 M + (1 - b1) G`` takes the
        place of M in D, and ``1 - b1^(t+1)``, the sum of N's weights, that of ``1 - b1^t``.

        A gradient with an element that is not finite or whose squares sum to more than its dtype holds, is skipped:
        the update is zero and the state stays, but for the count.  t is the number of gradients that were not.
        If no solver refreshes a basis, all bases of the matrix stay, and the failure is counted.
        """
        return self.update_many([grad], [state], step)[0]

    @torch.no_grad()
    def update_many(self, grads: Sequence[Tensor], states: Sequence[State], step: int) -> list[Tensor]:
        """Return what :meth:`update` would, matrices of equal shapes batched where that keeps their bits."""
        if not grads:
            return []
        out, keys, accepted = [torch.empty(0)] * len(grads), [], []
        for index, (peak, skipped, refreshes, offset) in enumerate(_read(grads, states)):
            grad = grads[index]
            if peak * peak * grad.numel() <= torch.finfo(grad.dtype).max:  # False for NaN
                due = (step + int(offset)) % self.settings.period == 0
                sides = [*grad.shape, *(block.size for block in self._blocks(tuple(grad.shape)))]
                keys.append((step - int(skipped), due, refreshes == 0, *batching.key(index, grad, sides)))
                accepted.append(index)
            else:
                out[index] = torch.zeros_like(grad)
                states[index]["skipped"].add_(1)
                warnings.warn(
                    "skipped a gradient that is not finite (counted in the state)", RuntimeWarning, stacklevel=2
                )
        for group in batching.group(keys):
            t, due, first = keys[group[0]][:3]
            members = [accepted[i] for i in group]
            gradients, mine = torch.stack([grads[i] for i in members]), [states[i] for i in members]
            for index, update in zip(members, self._advance(gradients, mine, t, due, first), strict=True):
                out[index] = update
        return out

    def _advance(self, gradients: Tensor, states: Sequence[State], t: int, due: bool, first: bool) -> Tensor:
        """Advance the equal-shaped ``states`` by their t-th gradients ``[b, m, n]`` and return the updates."""
        hyper, parts = self.settings, self._blocks(tuple(gradients.shape[1:]))
        beta1, beta2 = hyper.betas
        for state, gradient in zip(states, gradients, strict=True):
            state["momentum"].lerp_(gradient, 1.0 - beta1)
        momentum = torch.stack([s["momentum"] for s in states])
        if hyper.source == "2nd":
            self._average(gradients, states, parts)
        bases = [torch.stack([s[f"basis.{block.key}"] for s in states]).to(momentum.dtype) for block in parts]
        if (due or first) and parts:
            self._refresh(momentum, states, parts, bases, first)
        rotated = eigenbasis.rotate(gradients, parts, bases)
        for state, turned in zip(states, rotated, strict=True):
            state["second"].mul_(beta2).addcmul_(turned, turned, value=1.0 - beta2)
        seen = t
        if hyper.nesterov:
            momentum, seen = gradients.lerp(momentum, beta1), t + 1
        direction = eigenbasis.rotate(momentum, parts, bases)
        if parts:
            eigenbasis.drop_rounding(direction)  # not from the second moment: divided by nothing, a direction explodes
        direction = direction / torch.stack([s["second"] for s in states]).sqrt_().add_(hyper.eps)
        direction.mul_(hyper.gain * math.sqrt(1.0 - beta2**t) / (1.0 - beta1**seen))
        return eigenbasis.rotate(direction, parts, bases, back=True)

    def _average(self, gradients: Tensor, states: Sequence[State], parts: Sequence[Block]) -> None:
        beta = self.settings.betas[1] if self.settings.shampoo_beta is None else self.settings.shampoo_beta
        for block in parts:
            covariances = eigenbasis.covariance(block.upright(gradients))
            for state, covariance in zip(states, covariances, strict=True):
                state[f"factor.{block.key}"].lerp_(covariance, 1.0 - beta)

    def _refresh(
        self, momentum: Tensor, states: Sequence[State], parts: Sequence[Block], bases: Sequence[Tensor], first: bool
    ) -> None:
        """Start ``bases`` or turn them by one step of orthogonal iteration, the second moments in the same order.

        They change in place, unrounded: what is stored of them may be rounded, which counts at the first step, when the
        gradient has no part off the diagonal and Adam would take the rounding for one.
        """
        by_second = self.settings.source == "2nd"
        start = eigenbasis.eigenvectors if by_second else eigenbasis.left_singular_vectors
        multiply = eigenbasis.covariance_product if by_second else eigenbasis.momentum_product
        second = torch.stack([s["second"] for s in states])
        found: list[list[Solution]] = []
        for block, basis in zip(parts, bases, strict=True):
            key = f"factor.{block.key}"
            followed = torch.stack([s[key] for s in states]) if by_second else block.upright(momentum)
            if first:
                found.append(eigenbasis.solve(start, followed))
                continue
            product = multiply(followed, basis)
            order = eigenbasis.column_order(basis, product)
            eigenbasis.permute(second, block, order)
            found.append(eigenbasis.solve(eigenbasis.orthonormal, eigenbasis.take_columns(product, order)))
        for index, (state, *new) in enumerate(zip(states, *found, strict=True)):
            if not eigenbasis.count(state, new):
                continue
            turned = [solution.value for solution in new if solution.value is not None]
            for block, stacked, basis in zip(parts, bases, turned, strict=True):
                stacked[index] = basis
                state[f"basis.{block.key}"].copy_(basis)
            state["second"].copy_(second[index])
            state["refreshes"].add_(1)

    @torch.no_grad()
    def health(self, state: State, update: Tensor) -> dict[str, float]:
        """Return the worst ``orthogonality`` of the bases and ``condition`` of the factors; an eigvalsh a factor."""
        return eigenbasis.health(state, self._blocks(tuple(update.shape)))

    def _blocks(self, shape: Shape) -> tuple[Block, ...]:
        eigenbasis.require_matrix(shape, self.name)
        hyper = self.settings
        axes: tuple[Literal[0, 1], ...] = (0, 1)
        if hyper.geometry == "unilateral":
            axes = (0,) if shape[0] < shape[1] else (1,)
        return eigenbasis.blocks(shape, axes, hyper.max_side, split=hyper.beyond == "blocks")

    def flops(self, shape: Shape) -> float:
        """Return the products of :meth:`update`; 0 if not a matrix.

        Per block of length q against a side of k: two projections and the way back ``6 q^2 k``; the 2nd source adds
        ``2 q^2 k`` each step and ``2 q^3`` each period, the 1st ``4 q^2 k`` each period; a QR takes ``8/3 q^3``.  An
        operation count of AdamW's, 12 an element, is added.
        """
        return self._count(shape, refresh_2nd=2)

    def published_flops(self, shape: Shape) -> float:
        """Return the count of the released code: a refresh of the 2nd source has ``6 q^3`` of products."""
        return self._count(shape, refresh_2nd=6)

    def _count(self, shape: Shape, refresh_2nd: int) -> float:
        if len(shape) != 2:
            return 0.0
        total = 12.0 * numel(shape)
        for block in self._blocks(shape):
            q, k = block.size, shape[1 - block.axis]
            by_source = 2 * q * q * k, refresh_2nd * q**3
            if self.settings.source == "1st":
                by_source = 0, 4 * q * q * k
            total += 6 * q * q * k + by_source[0] + (by_source[1] + 8 / 3 * q**3) / self.settings.period
        return total

    def work(self, shape: Shape) -> Work:
        """Return the products of :meth:`flops`, its QR apart, and 100 bytes an element of passes."""
        sides = [block.size for block in self._blocks(shape)]
        qr = sum(8 / 3 * q**3 / self.settings.period for q in sides)
        products = self.flops(shape) - 12.0 * numel(shape) - qr
        passes = 100.0 * numel(shape) + sum(12.0 * q * q for q in sides)
        return Work(products={"float32": products}, qr=qr, passes=passes, kernels=40 + 12 * len(sides))

    def state_bytes(self, shape: Shape) -> int:
        """Return the bytes of two moments, the bases, with the 2nd source the factors, and the scalars."""
        sides = [block.size for block in self._blocks(shape)] if len(shape) == 2 else []
        dtype: torch.dtype = getattr(torch, self.settings.basis_dtype)
        per_square = dtype.itemsize + (4 if self.settings.source == "2nd" else 0)
        return 8 * numel(shape) + sum(per_square * q * q for q in sides) + 4 * len(COUNTERS)


def _read(grads: Sequence[Tensor], states: Sequence[State]) -> list[list[float]]:
    """Return rows of largest magnitude, ``skipped``, ``refreshes``, ``offset``, in one device synchronisation."""
    largest = [torch.linalg.vector_norm(grad, ord=float("inf")) for grad in grads]
    columns = [largest, *([state[name] for state in states] for name in ("skipped", "refreshes", "offset"))]
    return torch.stack([torch.stack(column) for column in columns]).T.tolist()
