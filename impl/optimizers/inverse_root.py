"""Inverse roots ``(A + r I)^(-power)`` of symmetric positive semi-definite matrices, for Shampoo.

r is ``ridge`` times the largest eigenvalue of A.  Every function works on a batch ``[b, q, q]`` of fp32 or fp64; a
matrix gets the same bits alone as among others where :func:`impl.optimizers.batching.keeps_bits` for q.  The root of
zero is the identity: without statistics there is nothing to precondition by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from impl.optimizers.eigenbasis import column_sums

POWER_STEPS = 32
"""Power iterations that estimate the largest eigenvalue, where nothing else finds it."""
NEWTON_STEPS = 100
"""Most steps of coupled Newton."""
USUAL_NEWTON_STEPS = 22
"""Steps that were needed for roots of 2, 4 and 8 at condition numbers of 1e6: 18 to 24; at 1e4 15 to 18."""
NEWTON_ERROR = 0.05
"""Largest element of ``|X^p A - I|`` that coupled Newton may leave; it usually leaves far less."""


def by_eigh(factor: Tensor, power: float, ridge: float) -> Tensor:
    """Return the roots from an eigendecomposition; eigenvalues that rounding made negative count as zero."""
    scaled, peak = _scaled(factor)
    values, vectors = torch.linalg.eigh(scaled)
    values = values.clamp_min(0.0)
    roots = _powers(values + ridge * values[:, -1:], -power)
    return _unscaled((vectors * roots.unsqueeze(-2)) @ vectors.mT, peak, power)


def by_newton(factor: Tensor, power: float, ridge: float) -> Tensor:
    """Return the roots from the coupled Newton iteration, matrix products alone; ``1 / power`` must be an integer p.

    ``X <- X T``, ``M <- T^p M`` with ``T = ((p + 1) I - M) / p`` from ``M = z A`` and ``X = z^(1/p) I`` (Iannazzo,
    "On the Newton method for the matrix p-th root", 2006).  z bounds the eigenvalues of M by (p + 1) / 2, so it
    converges.  A matrix stops when its M is the identity, or comes no closer for rounding.  NaN where even
    :data:`NEWTON_ERROR` is not reached.
    """
    p = round(1.0 / power)
    scaled, peak = _scaled(factor)
    identity = torch.eye(scaled.shape[-1], dtype=scaled.dtype, device=scaled.device)
    m = scaled + ridge * largest_eigenvalue(scaled) * identity
    bound = m.abs().sum(-1).amax(-1).view(-1, 1, 1)
    z = (p + 1.0) / 2.0 / torch.where(bound == 0, 1.0, bound)
    m, x = m * z, identity * _powers(z, power)
    error = _distance(m, identity)
    running = error > 0  # False for NaN: such a matrix fails below
    for _ in range(NEWTON_STEPS):
        turn = ((p + 1.0) * identity - m) / p
        next_m, next_x = _integer_power(turn, p) @ m, x @ turn
        next_error = _distance(next_m, identity)
        running &= (next_error < error) | (error > NEWTON_ERROR)
        m, x = torch.where(running, next_m, m), torch.where(running, next_x, x)
        error = torch.where(running, next_error, error)
        running &= error > 0
        if not running.any():
            break
    return _unscaled(torch.where(error <= NEWTON_ERROR, x, torch.nan), peak, power)


ROOTS = {"eigh": by_eigh, "coupled-newton": by_newton}
"""Methods by name."""


def newton_flops(side: int, power: float) -> float:
    """Return the operations of :func:`by_newton`: in a step two products and those of a p-th power."""
    p = round(1.0 / power)
    products = 2 + p.bit_length() - 1 + p.bit_count() - 1
    return 2.0 * products * USUAL_NEWTON_STEPS * side**3


def largest_eigenvalue(matrices: Tensor) -> Tensor:
    """Return an estimate from below ``[b, 1, 1]`` for ``[b, q, q]``, by power iterations from eight random vectors."""
    q = matrices.shape[-1]
    start = torch.randn(q, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    vectors = start.to(matrices).expand(len(matrices), -1, -1).contiguous()
    length = vectors.new_ones(len(matrices), 1, 8)
    for _ in range(POWER_STEPS):
        vectors = matrices @ (vectors / torch.where(length == 0, 1.0, length))
        length = column_sums(vectors * vectors).sqrt()
    return length.amax(-1, keepdim=True)


def _scaled(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``factor`` divided by its largest element, and that ``[b, 1, 1]``, so that nothing leaves the dtype."""
    peak = factor.abs().amax((-2, -1), keepdim=True)
    return factor / torch.where(peak == 0, 1.0, peak), peak


def _unscaled(roots: Tensor, peak: Tensor, power: float) -> Tensor:
    """Return the roots of what :func:`_scaled` divided by ``peak``, the identity where that is zero."""
    identity = torch.eye(roots.shape[-1], dtype=roots.dtype, device=roots.device)
    return torch.where(peak == 0, identity, roots * _powers(torch.where(peak == 0, 1.0, peak), -power))


def _powers(batch: Tensor, exponent: float) -> Tensor:
    """Return ``batch ** exponent``, one by one: the end of a vectorised loop computes other bits than its body."""
    return torch.stack([values.pow(exponent) for values in batch])


def _integer_power(matrices: Tensor, p: int) -> Tensor:
    """Return the product of p times ``matrices``, by repeated squaring."""
    result: Tensor | None = None
    while True:
        if p & 1:
            result = matrices if result is None else result @ matrices
        p >>= 1
        if p == 0:
            return matrices if result is None else result
        matrices = matrices @ matrices


def _distance(matrices: Tensor, identity: Tensor) -> Tensor:
    return (matrices - identity).abs().amax((-2, -1), keepdim=True)
