"""How far a Hessian is from diagonal, and how large, from its products with vectors: the misalignment of a basis.

The Hessian is that of the loss in one matrix ``[m, n]`` of weights, all others fixed: ``[d, d]`` with ``d = m n``,
never formed.  Everything is float64: a product is a difference of gradients.  Sources: Jung, Shin, Lee, arXiv
2602.03515, for the (1,1)-norm as the measure of misalignment and for Cauchy probes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from impl.optimizers.base import Shape

Gradient = Callable[[Tensor], Tensor]
"""The gradient ``[m, n]`` of the loss at the weights ``[m, n]``."""
Product = Callable[[Tensor], Tensor]
"""The Hessian times a vector, both in the shape ``[m, n]`` of the weights."""
STEP = 1e-4
"""Length of a difference's step as a share of that of the weights: with it, truncation is about ``STEP ** 2`` of the
product and rounding about ``1e-16 / STEP``."""
RESAMPLES = 50
"""Of the bootstrap behind a standard error."""


@dataclass(frozen=True)
class Measured:
    """A number with its standard error over probes."""

    value: float
    error: float


@dataclass(frozen=True)
class Eigenvalue:
    """The eigenvalue of largest magnitude.

    residual: ``|H v - value v| / |H v|`` of its unit vector ``v``: some eigenvalue is that close, relatively.
    """

    value: float
    residual: float


def difference_product(gradient: Gradient, at: Tensor, step: float = STEP) -> Product:
    """Return the product ``(g(W + e Z) - g(W - e Z)) / 2 e`` at the weights ``W`` (``at``, float64).

    ``e |Z|`` is ``step |W|`` whatever the length of the probe ``Z``, which has no bound if its elements are Cauchy.
    Used because fast attention kernels, and the loss used in training, have no second derivative in autograd.
    """
    if at.dtype != torch.float64:
        raise ValueError(f"differences of gradients need float64 weights, not {at.dtype}")
    length = float(at.norm()) or 1.0

    def product(probe: Tensor) -> Tensor:
        size = float(probe.norm())
        if size == 0.0:
            return torch.zeros_like(probe)
        e = step * length / size
        return (gradient(at + e * probe) - gradient(at - e * probe)) / (2 * e)

    return product


def rotated(product: Product, left: Tensor | None, right: Tensor | None) -> Product:
    """Return the product with the Hessian in the coordinates ``X = U^T W V``: ``Z -> U^T H[U Z V^T] V``.

    left, right: orthogonal ``U`` ``[m, m]`` and ``V`` ``[n, n]``; None leaves that side as it is.
    """

    def turn(matrix: Tensor, *, back: bool) -> Tensor:
        if left is not None:
            matrix = (left if back else left.mT) @ matrix
        if right is not None:
            matrix = matrix @ (right.mT if back else right)
        return matrix

    return lambda probe: turn(product(turn(probe, back=True)), back=False)


def entry_sum(product: Product, shape: Shape, samples: int, generator: torch.Generator) -> Measured:
    """Return ``sum_ij |H_ij|`` from products with ``samples`` matrices of independent standard Cauchy elements.

    ``(H z)_i`` is then Cauchy with scale ``sum_j |H_ij|``, which is the median of its magnitude.  A sample's median is
    high by about ``1.2 / samples`` of it, whatever the basis.
    """
    rows = torch.stack([product(_cauchy(shape, generator)).flatten().abs() for _ in range(samples)])
    value = float(rows.quantile(0.5, dim=0).sum())
    # the rows of one probe depend on each other, so that whole probes are drawn again
    draws = torch.randint(samples, (RESAMPLES, samples), generator=generator)
    again = torch.stack([rows[draw].quantile(0.5, dim=0).sum() for draw in draws])
    return Measured(value, float(again.std()))


def frobenius_norm(product: Product, shape: Shape, samples: int, generator: torch.Generator) -> Measured:
    """Return ``|H|_F``, the root of the mean of ``|H z|^2`` over ``samples`` standard normal ``z``."""
    squares = torch.stack([product(_normal(shape, generator)).square().sum() for _ in range(samples)])
    value = math.sqrt(float(squares.mean()))
    spread = float(squares.std()) / math.sqrt(samples) if samples > 1 else math.nan
    return Measured(value, spread / (2 * value) if value else 0.0)


def normalised(total: float, frobenius: float, elements: int) -> float:
    """Return ``sum_ij |H_ij| / (d |H|_F)`` for ``d`` elements of the weights; NaN if the Hessian is zero.

    1 if all entries of H have the same size, ``1 / sqrt(d)`` for a multiple of the identity.  The division is ours.
    """
    return total / (elements * frobenius) if frobenius else math.nan


def largest_eigenvalue(
    product: Product, shape: Shape, iterations: int, generator: torch.Generator, tolerance: float = 1e-3
) -> Eigenvalue:
    """Return the eigenvalue of largest magnitude by power iteration.

    It stops at a residual of ``tolerance``, or after ``iterations`` products.
    """
    vector = _normal(shape, generator)
    vector /= vector.norm()
    found = Eigenvalue(math.nan, math.nan)
    for _ in range(iterations):
        image = product(vector)
        value, length = float((vector * image).sum()), float(image.norm())
        if length == 0.0:
            return Eigenvalue(0.0, 0.0)
        found = Eigenvalue(value, float((image - value * vector).norm()) / length)
        if not found.residual > tolerance:
            break
        vector = image / length
    return found


def step_error(gradient: Gradient, at: Tensor, generator: torch.Generator, step: float = STEP) -> float:
    """Return by how much half the step changes the product with one normal probe, relative to its length.

    It says whether the products can be trusted: far below the error of the probes.
    """
    probe = _normal(tuple(at.shape), generator)
    whole, half = (difference_product(gradient, at, s)(probe) for s in (step, step / 2))
    return float((whole - half).norm() / half.norm())


def random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """Return a float64 orthogonal ``[size, size]``, uniform over all of them (Haar)."""
    q, r = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator))
    return q * r.diagonal().sign()


def _normal(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _cauchy(shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=torch.float64).cauchy_(generator=generator)
