"""Orthogonal bases that follow the eigenvectors of a side of a matrix: how they start, turn and are applied.

Every function works on a batch ``[b, m, n]`` of equal shapes.  Products are batched and reductions are products too, so
that on a CPU a matrix gets the same bits alone (``b = 1``) as among others, if
:func:`impl.optimizers.batching.keeps_bits` for its sides.  Everything is fp32 or fp64 as it comes, and relies on
PyTorch's default of not using TF32, which would turn small eigenvalues negative and the basis by up to 90 degrees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from impl.optimizers.base import Shape, State

RIDGE = 1e-3
"""Share of the mean eigenvalue added to ``M M^T`` before a power step: well above the rounding of the product, so that
the trailing columns of a rank-deficient ``M`` stay where they were."""
ROUNDING = 1e-6
"""Share of the largest element of an fp32 projection below which there is little but rounding."""
TSQR_ROWS = 4096
"""Rows of a piece of a tall matrix."""
CONDITION_FLOOR = 1e-7
"""Share of the largest eigenvalue below which an eigenvalue of an fp32 factor is rounding."""
CONDITION_LIMIT = 2e7
"""A condition number that only a factor with elements that are not finite can exceed, given the floor."""


@dataclass(frozen=True)
class Block:
    """Rows (``axis`` 0) or columns (``axis`` 1) ``start .. end`` of a matrix, with an orthogonal basis of their own."""

    axis: Literal[0, 1]
    start: int
    end: int

    @property
    def size(self) -> int:
        """Elements of the side that the basis covers, so the basis is ``[size, size]``."""
        return self.end - self.start

    @property
    def key(self) -> str:
        """A name among the blocks of one matrix."""
        return f"{('left', 'right')[self.axis]}.{self.start}"

    def of(self, matrices: Tensor) -> Tensor:
        """Return the block's rows or columns of ``[b, m, n]``, a view."""
        return matrices[:, self.start : self.end] if self.axis == 0 else matrices[:, :, self.start : self.end]

    def upright(self, matrices: Tensor) -> Tensor:
        """Return the block's part as ``[b, size, other side]``, a view: transposed for columns."""
        return self.of(matrices) if self.axis == 0 else self.of(matrices).mT


def blocks(shape: Shape, axes: Sequence[Literal[0, 1]], max_side: int, *, split: bool = False) -> tuple[Block, ...]:
    """Return the blocks of the ``axes`` of a matrix of ``shape``, left ones first.

    A side longer than ``max_side`` is left out, or cut into blocks of ``max_side`` (the last one shorter) if ``split``.
    """
    out: list[Block] = []
    for axis in axes:
        side = shape[axis]
        if side <= max_side:
            out.append(Block(axis, 0, side))
        elif split:
            out += [Block(axis, start, min(start + max_side, side)) for start in range(0, side, max_side)]
    return tuple(out)


def require_matrix(shape: Shape, optimizer: str) -> None:
    """Raise ValueError unless ``shape`` is a matrix's."""
    if len(shape) != 2:
        raise ValueError(f"{optimizer} updates matrices, not a tensor of shape {shape}: route it to adamw")


def rotate(matrices: Tensor, parts: Sequence[Block], bases: Sequence[Tensor], *, back: bool = False) -> Tensor:
    """Return ``U^T X V`` for ``X`` ``[b, m, n]``, or ``U X V^T`` if ``back``; a side without blocks is left alone.

    bases: ``[b, size, size]`` of each block; several blocks of a side make a block-diagonal ``U`` or ``V``.
    """
    for axis in (0, 1):
        turned: list[Tensor] = []
        for block, basis in zip(parts, bases, strict=True):
            if block.axis == axis:
                factor = basis if back == (axis == 0) else basis.mT
                turned.append(factor @ block.of(matrices) if axis == 0 else block.of(matrices) @ factor)
        if turned:
            matrices = turned[0] if len(turned) == 1 else torch.cat(turned, dim=axis - 2)
    return matrices


def drop_rounding(projections: Tensor) -> None:
    """Set elements of ``[b, m, n]`` to zero that are below :data:`ROUNDING` of the largest of their matrix, in place.

    In fp64 the share is smaller as its precision is finer.
    A basis that has seen the gradients also holds directions in which they have no part; Adam would blow up what
    rounding leaves there to the size of every other element.
    """
    size = projections.abs()
    share = ROUNDING * (torch.finfo(projections.dtype).eps / torch.finfo(torch.float32).eps)
    projections.masked_fill_(size <= share * size.amax((-2, -1), keepdim=True), 0.0)


def covariance(upright: Tensor) -> Tensor:
    """Return ``X X^T`` ``[b, q, q]`` of ``X`` ``[b, q, k]``."""
    return upright @ upright.mT


def covariance_product(factor: Tensor, basis: Tensor) -> Tensor:
    """Return ``A Q`` for the covariance ``A`` and the basis ``Q``, both ``[b, q, q]``."""
    return factor @ basis


def momentum_product(upright: Tensor, basis: Tensor) -> Tensor:
    """Return ``(X X^T + r I) Q`` for ``X`` ``[b, q, k]`` without forming ``X X^T``.

    r is :data:`RIDGE` of the mean eigenvalue of ``X X^T``.  The diagonal that orders the columns is then
    ``|X^T q_i|^2 + r``: the same order as without the ridge.
    """
    inner = upright.mT @ basis
    sums = column_sums(inner * inner)  # of |X^T q_i|^2, which add up to the trace of X X^T
    ridge = sums @ sums.new_full((len(basis), basis.shape[-1], 1), RIDGE / basis.shape[-1])
    return torch.addcmul(upright @ inner, basis, ridge)


def column_order(basis: Tensor, product: Tensor) -> Tensor:
    """Return the order ``[b, q]`` of falling ``diag(Q^T A Q)`` for ``product`` A Q; equal values keep their places."""
    return column_sums(basis * product).squeeze(-2).argsort(dim=-1, descending=True, stable=True)


def take_columns(matrices: Tensor, order: Tensor) -> Tensor:
    """Return the columns of each ``[b, ., q]`` in its ``order`` ``[b, q]``."""
    return matrices.gather(-1, order.unsqueeze(-2).expand(-1, matrices.shape[-2], -1))


def permute(second: Tensor, block: Block, order: Tensor) -> None:
    """Bring the block's rows or columns of the second moments ``[b, m, n]`` into ``order`` ``[b, size]``, in place.

    The other axis is not touched.
    """
    upright = block.upright(second)
    upright.copy_(take_columns(upright.mT, order).mT)


def orthonormal(product: Tensor) -> Tensor:
    """Return Q of the QR factorisation of ``[b, q, q]``; of ``A Q``, it is one step of orthogonal iteration."""
    return torch.linalg.qr(product).Q


def eigenvectors(factor: Tensor) -> Tensor:
    """Return the eigenvectors of symmetric ``[b, q, q]`` as columns, that of the largest eigenvalue first."""
    return torch.linalg.eigh(factor).eigenvectors.flip(-1)


def left_singular_vectors(upright: Tensor) -> Tensor:
    """Return all q left singular vectors of ``X`` ``[b, q, k]`` as columns, that of the largest singular value first.

    A wide ``X`` is first reduced to its triangular factor in pieces, as ``X = R^T Q^T`` has the left singular vectors
    of ``R^T``.
    """
    q, k = upright.shape[-2:]
    if k > q:
        upright = tsqr(upright.mT, max(TSQR_ROWS, 2 * q))[1].mT
    return torch.linalg.svd(upright, full_matrices=True).U


def tsqr(tall: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return Q ``[..., m, n]`` and R ``[..., n, n]`` of ``tall`` ``[..., m, n]``, m >= n, from pieces of ``rows`` rows.

    A QR of every piece, one of their stacked triangular factors, and a product: as accurate as one QR of the whole, and
    no piece needs more than its rows.  Signs of Q's columns (and R's rows) may differ from those of one QR.
    """
    if tall.shape[-2] < tall.shape[-1]:
        raise ValueError(f"tsqr needs at least as many rows as columns, not {tuple(tall.shape)}")
    pieces = [torch.linalg.qr(piece) for piece in tall.split(rows, dim=-2)]
    if len(pieces) == 1:
        return pieces[0].Q, pieces[0].R
    top = torch.linalg.qr(torch.cat([piece.R for piece in pieces], dim=-2))
    parts = top.Q.split([piece.R.shape[-2] for piece in pieces], dim=-2)
    return torch.cat([piece.Q @ part for piece, part in zip(pieces, parts, strict=True)], dim=-2), top.R


class Solution(NamedTuple):
    """What :func:`solve` found for one matrix.

    value: None if nothing finite was found.  fallback: whether it took float64 or another method.
    """

    value: Tensor | None
    fallback: bool


def solve(
    function: Callable[[Tensor], Tensor], batch: Tensor, rescue: Callable[[Tensor], Tensor] | None = None
) -> list[Solution]:
    """Return what ``function`` finds for each ``[q, k]`` of ``batch``: a basis, or another ``[q, q]``.

    If the batch fails as a whole, each matrix is tried alone, then in float64, so that one does not harm the others.

    rescue: a sturdier function for float64 instead.
    """
    result = _attempt(function, batch)
    if result is not None:
        return [Solution(value, False) for value in result]
    return [_solve_alone(function, matrix.unsqueeze(0), rescue) for matrix in batch]


def count(state: State, found: Sequence[Solution]) -> bool:
    """Add to the state's ``fallbacks`` and ``failures`` what one refresh ``found``; return whether all succeeded."""
    whole = all(solution.value is not None for solution in found)
    if any(solution.fallback for solution in found):
        state["fallbacks"].add_(1)
    if not whole:
        state["failures"].add_(1)
    return whole


def _solve_alone(
    function: Callable[[Tensor], Tensor], matrix: Tensor, rescue: Callable[[Tensor], Tensor] | None
) -> Solution:
    result = _attempt(function, matrix)
    if result is not None:
        return Solution(result[0], False)
    if matrix.dtype != torch.float64 or rescue is not None:
        result = _attempt(rescue or function, matrix.double())
        if result is not None:
            return Solution(result[0].to(matrix.dtype), True)
    return Solution(None, False)


def _attempt(function: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor | None:
    try:
        result = function(batch)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return None
    return result if math.isfinite(float(result.sum())) else None  # far too small for the sum to overflow


def orthogonality(state: State, parts: Sequence[Block]) -> float:
    """Return the largest element of ``|Q^T Q - I|`` over the bases in ``state``, computed in fp32 at least."""
    found = [0.0]
    for block in parts:
        basis = state[f"basis.{block.key}"]
        basis = basis.to(torch.promote_types(basis.dtype, torch.float32))
        gram = basis.mT @ basis
        gram.diagonal().sub_(1.0)
        found.append(float(gram.abs().amax()))
    return worst(found)


def health(state: State, parts: Sequence[Block]) -> dict[str, float]:
    """Return ``orthogonality`` of the bases and ``condition`` of the factors in ``state``, the worst of each.

    Factors of low rank are nothing unusual, and their condition is cut off at ``1 / CONDITION_FLOOR``.
    """
    factors = [state[key] for key in (f"factor.{block.key}" for block in parts) if key in state]
    conditions = [condition(factor, CONDITION_FLOOR) for factor in factors]
    return {"orthogonality": orthogonality(state, parts), "condition": worst([1.0, *conditions])}


def condition(factor: Tensor, ridge: float) -> float:
    """Return the condition number of ``A + ridge * largest eigenvalue * I``: at most ``1 + 1 / ridge``.

    1 for a zero matrix, infinity if it is not finite or has no eigenvalues to be found.  Costs an ``eigvalsh``.
    """
    peak = float(factor.abs().amax())
    if peak == 0.0:
        return 1.0
    try:
        values = torch.linalg.eigvalsh(factor / peak).clamp_min_(0.0)
    except torch.linalg.LinAlgError:  # pyright: ignore[reportPrivateImportUsage]
        return math.inf
    low, high = float(values[0]), float(values[-1])
    return worst([high * (1.0 + ridge) / (low + ridge * high)])


def worst(values: Sequence[float]) -> float:
    """Return the largest value, infinity if one is not a number."""
    return math.inf if any(map(math.isnan, values)) else max(values)


def column_sums(matrices: Tensor) -> Tensor:
    """Return ``[b, 1, n]``; by a product, because the order of a sum's terms may depend on the batch."""
    return matrices.new_ones(len(matrices), 1, matrices.shape[-2]) @ matrices
