"""What the tests of matrix optimizers share: gradients, short runs, views of the state, and solvers that fail."""

from __future__ import annotations

import torch
from torch import Tensor

from impl.optimizers.base import create

CPU = torch.device("cpu")
VARIANTS = [(source, geometry) for source in ("2nd", "1st") for geometry in ("bilateral", "unilateral")]


def gradients(shape, count, seed=0, dtype=torch.float32) -> list[Tensor]:
    """Noisy gradients with a covariance of their own on both sides."""
    generator = torch.Generator().manual_seed(seed)
    m, n = shape
    left, right = torch.randn(m, m, generator=generator), torch.randn(n, n, generator=generator)
    inner = [torch.randn(m, n, generator=generator) for _ in range(count)]
    return [(left @ x @ right / (m * n) ** 0.5).to(dtype) for x in inner]


def rotation(**settings):
    return create("basis-rotation", settings)


def run(optimizer, grads, state=None, start=1):
    state = optimizer.init_state(tuple(grads[0].shape), CPU, grads[0].dtype) if state is None else state
    return [optimizer.update(grad, state, step) for step, grad in enumerate(grads, start)], state


def clone(state):
    return {key: tensor.clone() for key, tensor in state.items()}


def bases(state):
    return {key: tensor.float() for key, tensor in state.items() if key.startswith("basis.")}


def degenerate(kind, grads, tiny=1e-20, huge=1e15):
    """``grads`` made zero, of rank 1, without their third column, tiny or huge."""
    if kind == "zero":
        return [g * 0 for g in grads]
    if kind == "zero, then not":
        return [grads[0] * 0, *grads[1:]]
    if kind == "rank-1":
        return [torch.outer(g[:, 0], g[0]) for g in grads]
    if kind == "zero column":
        return [g.index_fill(1, torch.tensor([2]), 0.0) for g in grads]
    return [g * {"tiny": tiny, "huge": huge}[kind] for g in grads]


def failing(function, fails):
    """``function`` that does not converge where ``fails(x)``."""

    def wrapped(x, *args, **kwargs):
        if fails(x):
            raise torch.linalg.LinAlgError("did not converge")
        return function(x, *args, **kwargs)

    return wrapped
