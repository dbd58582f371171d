"""Newton-Schulz iteration: an approximate polar factor of a matrix, by matrix products alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.optimizers import batching

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


BATCHED_SIDES = range(8, 97)
"""Smaller sides of the matrices that are batched.

Milliseconds of eight matrices one by one and in a batch (``scripts/bench_newton_schulz.py``, one AVX-512 core, torch
2.13):  32 x 96: bf16 3.8, 1.1, fp32 1.3, 0.7;  96 x 288: bf16 7.5, 4.9, fp32 7.8, 7.6;  192 x 576: bf16 30, 29, fp32
51, 56.  Below 8, PyTorch multiplies a batch by other code than a single matrix, with other bits.
"""


def normalize(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``matrix`` divided by its exact Frobenius norm, in a new contiguous tensor of ``dtype``.

    There is no floor: 1e-30 gives the same direction as 1, and only exact zero stays zero.  The largest magnitude is
    divided out first, because the squares of tiny or huge elements leave the range of fp32.  All of it runs in the
    widest of fp32, the matrix's precision and ``dtype``, and without a device synchronisation.  A NaN or infinity
    anywhere gives NaN.
    """
    wide = torch.promote_types(torch.promote_types(dtype, matrix.dtype), torch.float32)
    x = matrix.to(wide).contiguous()
    one = torch.ones((), dtype=wide, device=matrix.device)
    peak = torch.linalg.vector_norm(x, ord=float("inf"))
    x = x / torch.where(peak == 0, one, peak)
    norm = torch.linalg.vector_norm(x)
    return x.div_(torch.where(norm == 0, one, norm)).to(dtype)


def polynomial(x: Tensor, coefficients: Coefficients, steps: int) -> Tensor:
    """Apply ``steps`` odd quintic polynomials to the singular values of ``x``, which is overwritten.

    x: contiguous, ``[m, n]`` or a batch ``[b, m, n]``.

    ``x <- a x + (b G + c G^2) x`` with ``G = x x^T``; for a tall matrix ``x <- a x + x (b G + c G^2)`` with
    ``G = x^T x``, which is the same without transposing.  A step costs ``4 max min^2 + 2 min^3`` operations: G and its
    square are symmetric, but PyTorch has no product that computes only half of them.
    """
    tall, side = x.shape[-2] > x.shape[-1], min(x.shape[-2:])
    multiply, multiply_add = (torch.mm, torch.addmm) if x.dim() == 2 else (torch.bmm, torch.baddbmm)
    gram = x.new_empty(*x.shape[:-2], side, side)
    gram_polynomial, other = torch.empty_like(gram), torch.empty_like(x)
    for step in range(steps):
        a, b, c = coefficients[min(step, len(coefficients) - 1)]
        left, right = (x.mT, x) if tall else (x, x.mT)
        multiply(left, right, out=gram)
        multiply_add(gram, gram, gram, beta=b, alpha=c, out=gram_polynomial)
        left, right = (x, gram_polynomial) if tall else (gram_polynomial, x)
        multiply_add(x, left, right, beta=a, out=other)
        x, other = other, x
    return x


def orthogonalize(matrix: Tensor, coefficients: Coefficients, steps: int, dtype: torch.dtype) -> Tensor:
    """Return an approximate polar factor of ``matrix`` ``[m, n]`` in ``dtype``, contiguous; the input is not modified.

    Every product runs on tensors allocated here, so the bits depend on the matrix alone and not on where in a buffer
    it lay.
    """
    return polynomial(normalize(matrix, dtype), coefficients, steps)


def orthogonalize_many(
    matrices: Sequence[Tensor], coefficients: Coefficients, steps: int, dtype: torch.dtype
) -> list[Tensor]:
    """Return :func:`orthogonalize` of each, bit for bit: equal shapes in one batch where :func:`batched` says so."""
    out = [torch.empty(0)] * len(matrices)
    keys = [(m.shape, m.device) if batched(m, dtype) else index for index, m in enumerate(matrices)]
    for members in batching.group(keys):
        alone = [normalize(matrices[i], dtype) for i in members]
        if len(members) == 1:
            out[members[0]] = polynomial(alone[0], coefficients, steps)
            continue
        for index, result in zip(members, polynomial(torch.stack(alone), coefficients, steps), strict=True):
            out[index] = result
    return out


def batched(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Return whether several matrices like ``matrix`` ``[m, n]``, iterated on in ``dtype``, are multiplied as a batch.

    They are where that is faster (:data:`BATCHED_SIDES`) and gives every matrix the bits that it has alone; on a GPU
    neither was measured.
    """
    side = min(matrix.shape)
    exact = matrix.device.type == "cpu" and batching.keeps_bits(dtype.itemsize, matrix.numel(), side * side)
    return exact and side in BATCHED_SIDES
