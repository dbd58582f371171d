"""Newton-Schulz iteration: an approximate polar factor of a matrix, by matrix products alone."""

from __future__ import annotations

import torch
from torch import Tensor

Coefficients = tuple[tuple[float, float, float], ...]

COEFFICIENT_SETS: dict[str, Coefficients] = {
    # Keller Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024; also torch.optim.Muon's default.
    "simple": ((3.4445, -4.7750, 2.0315),),
    # One polynomial a step; YouJiacheng for modded-nanogpt, 2025, "quintic" in NVIDIA Emerging-Optimizers.
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al., "The Polar Express", arXiv 2505.16932, with the safety factor of their reference code.
    "polar-express": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
    # "aol" in NVIDIA Emerging-Optimizers, here after the same Frobenius normalisation as every other set.
    "aol": (
        (4.0098, -7.0585, 2.4635),
        (3.4585, -5.5479, 2.5959),
        (2.7573, -3.2939, 1.4254),
        (2.7215, -3.0494, 1.3169),
    ),
    # Released by the Qwen team with the code of Canzona (arXiv 2602.06079).
    "qwen-express": (
        (8.3865, -24.3696, 17.7251),
        (4.1414, -3.0173, 0.5524),
        (3.9226, -2.8672, 0.5357),
        (3.2540, -2.3922, 0.4827),
        (2.2512, -1.5963, 0.3960),
        (1.8700, -1.2279, 0.3582),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
"""Polynomials ``a x + b x^3 + c x^5`` by name, one per step; the last is repeated if there are more steps."""


def normalize(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``matrix`` divided by its exact Frobenius norm, in a new contiguous tensor of ``dtype``.

    There is no floor: 1e-30 gives the same direction as 1, and only exact zero stays zero.  The largest magnitude is
    divided out first, because the squares of tiny or huge elements leave the range of fp32.  All of it runs in fp32 (or
    in ``dtype`` if that is wider) and without a device synchronisation.  A NaN or infinity anywhere gives NaN.
    """
    wide = torch.promote_types(dtype, torch.float32)
    x = matrix.to(wide)
    one = torch.ones((), dtype=wide, device=matrix.device)
    peak = torch.linalg.vector_norm(x, ord=float("inf"))
    x = x / torch.where(peak == 0, one, peak)
    norm = torch.linalg.vector_norm(x)
    return x.div_(torch.where(norm == 0, one, norm)).to(dtype).contiguous()


def polynomial(x: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """Apply ``steps`` odd quintic polynomials to the singular values of ``x`` ``[m, n]``, which is overwritten.

    ``x <- a x + (b G + c G^2) x`` with ``G = x x^T``; for a tall matrix ``x <- a x + x (b G + c G^2)`` with
    ``G = x^T x``, which is the same without transposing.  A step costs ``4 max min^2 + 2 min^3`` operations.
    """
    tall = x.shape[0] > x.shape[1]
    side = min(x.shape)
    gram, gram_polynomial, other = x.new_empty(side, side), x.new_empty(side, side), torch.empty_like(x)
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        left, right = (x.T, x) if tall else (x, x.T)
        torch.mm(left, right, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=gram_polynomial)
        left, right = (x, gram_polynomial) if tall else (gram_polynomial, x)
        torch.addmm(x, left, right, beta=a, out=other)
        x, other = other, x
    return x


def orthogonalize(matrix: Tensor, coefficients: Coefficients, steps: int, dtype: torch.dtype) -> Tensor:
    """Return an approximate polar factor of ``matrix`` ``[m, n]`` in ``dtype``, contiguous; the input is not modified.

    Every product runs on tensors allocated here, so the bits depend on the matrix alone and not on where in a buffer
    it lay.
    """
    return polynomial(normalize(matrix, dtype), coefficients, steps)
