"""Times of the Newton-Schulz iteration against the plain loop that everybody writes, per precision and set of shapes.

    python scripts/bench_newton_schulz.py --model qwen3-tiny --repetitions 20
    python scripts/bench_newton_schulz.py --model qwen3-1.7b --layers 1 --shape 4096x2048 --repetitions 4
    python scripts/bench_newton_schulz.py --shape 96x288 --count 8

Every repetition runs all variants one after another on one thread.  Shown are medians with quartiles of CPU time, which
is wall time on an idle machine, and of the plain bf16 loop's time over the variant's within a repetition.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from impl.models import catalogue
from impl.optimizers import batching
from impl.optimizers.newton_schulz import COEFFICIENT_SETS, normalize, orthogonalize, orthogonalize_many, polynomial
from impl.optimizers.routing import is_matrix

SIMPLE = COEFFICIENT_SETS["simple"]
A, B, C = SIMPLE[0]


def plain(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """One matrix after another, as in Keller Jordan's Muon."""
    out = []
    for matrix in matrices:
        x = (matrix / (matrix.norm() + 1e-7)).to(dtype)
        tall = x.shape[0] > x.shape[1]
        if tall:
            x = x.T
        for _ in range(5):
            gram = x @ x.T
            polynomial = B * gram + C * gram @ gram
            x = A * x + polynomial @ x
        out.append(x.T if tall else x)
    return out


def one_by_one(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Ours without batches."""
    return [orthogonalize(matrix, SIMPLE, 5, dtype) for matrix in matrices]


def ours(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """As Muon runs it."""
    return orthogonalize_many(matrices, SIMPLE, 5, dtype)


def in_batches(matrices: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Ours with a batch of all equal shapes, whether it pays or not."""
    out: list[Tensor] = []
    for members in batching.group([matrix.shape for matrix in matrices]):
        out += polynomial(torch.stack([normalize(matrices[i], dtype) for i in members]), SIMPLE, 5)
    return out


def given(model: str, layers: int | None, shape: tuple[int, ...] | None, count: int | None) -> list[Tensor]:
    """Return a random matrix for each of the model's that Muon takes, of any or one ``shape``, or ``count`` of it."""
    generator = torch.Generator().manual_seed(0)
    shapes = [p.shape for p in catalogue.load(model, layers=layers).parameters(1) if is_matrix(p)]
    if shape is not None:
        shapes = [shape] * (shapes.count(shape) if count is None else count)
    return [torch.randn(shape, generator=generator) for shape in shapes]


LOOPS: dict[str, Callable[[Sequence[Tensor], torch.dtype], list[Tensor]]] = {
    "plain": plain,
    "one by one": one_by_one,
    "in batches": in_batches,
    "ours": ours,
}
VARIANTS = [f"{loop} {dtype}" for dtype in ("bfloat16", "float32") for loop in LOOPS]
REFERENCE = VARIANTS[0]


def measure(matrices: Sequence[Tensor], variants: Sequence[str], repetitions: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each variant in each repetition, after one on small pieces that is not counted."""
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for repetition in range(repetitions + 1):
        for variant in variants:
            loop, dtype = variant.rsplit(" ", 1)
            start = time.process_time()
            LOOPS[loop](matrices if repetition else [m[:256, :256] for m in matrices], getattr(torch, dtype))
            if repetition:
                seconds[variant].append(time.process_time() - start)
    return seconds


def spread(values: Sequence[float]) -> str:
    """Return the median and quartiles as text."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:10.2f} [{low:.2f}, {high:.2f}]"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-tiny", choices=catalogue.names())
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--shape", default=None, help="only matrices of this shape, such as 4096x2048")
    parser.add_argument("--count", type=int, default=None, help="so many of --shape, whatever the model has")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS[1:], default=VARIANTS[1:])
    args = parser.parse_args()
    torch.set_num_threads(1)
    shape = tuple(map(int, args.shape.split("x"))) if args.shape else None
    matrices = given(args.model, args.layers, shape, args.count)
    shapes = ", ".join(dict.fromkeys(f"{m} x {n}" for m, n in (x.shape for x in matrices)))
    print(f"{len(matrices)} matrices of {shapes}; torch {torch.__version__}, ", end="")
    print(
        f"{torch.backends.cpu.get_cpu_capability()}, 1 thread, n = {args.repetitions}",
        flush=True,
    )
    seconds = measure(matrices, [REFERENCE, *args.variants], args.repetitions)
    for name, found in seconds.items():
        ratios = [a / b for a, b in zip(seconds[REFERENCE], found, strict=True)]
        print(f"{name:20} {spread([1e3 * s for s in found]):>32} ms   plain bf16 / this {spread(ratios)}")


if __name__ == "__main__":
    main()
