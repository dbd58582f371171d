"""What the tests of basis rotation share: noisy gradients, short runs, and views of the state."""

from __future__ import annotations

import torch
from torch import Tensor

from impl.optimizers.base import create

CPU = torch.device("cpu")
VARIANTS = [(source, geometry) for source in ("2nd", "1st") for geometry in ("bilateral", "unilateral")]


def gradients(shape, count, seed=0) -> list[Tensor]:
    """Noisy gradients with a covariance of their own on both sides."""
    generator = torch.Generator().manual_seed(seed)
    m, n = shape
    left, right = torch.randn(m, m, generator=generator), torch.randn(n, n, generator=generator)
    return [left @ torch.randn(m, n, generator=generator) @ right / (m * n) ** 0.5 for _ in range(count)]


def rotation(**settings):
    return create("basis-rotation", settings)


def run(optimizer, grads, state=None, start=1):
    state = optimizer.init_state(tuple(grads[0].shape), CPU) if state is None else state
    return [optimizer.update(grad, state, step) for step, grad in enumerate(grads, start)], state


def clone(state):
    return {key: tensor.clone() for key, tensor in state.items()}


def bases(state):
    return {key: tensor.float() for key, tensor in state.items() if key.startswith("basis.")}
