"""NAdam against its closed form (test_oracles.py has torch.optim.NAdam), and on pieces of a tensor."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from impl.optimizers.base import create

CPU = torch.device("cpu")


def gradients(shape, count, seed=0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10.0 ** -(i % 3) for i in range(count)]


def closed_form(grads, beta1, beta2, eps, decay) -> Tensor:
    """The last update in float64, from sums and products over the whole history."""
    t = len(grads)
    mu = [beta1 * (1 - 0.5 * 0.96 ** (i * decay)) for i in range(1, t + 2)]
    first = sum((1 - beta1) * beta1 ** (t - i) * g.double() for i, g in enumerate(grads, 1))
    second = sum((1 - beta2) * beta2 ** (t - i) * g.double() ** 2 for i, g in enumerate(grads, 1))
    ahead = mu[t] * first / (1 - math.prod(mu)) + (1 - mu[t - 1]) * grads[-1].double() / (1 - math.prod(mu[:t]))
    return ahead / ((second / (1 - beta2**t)) ** 0.5 + eps)


@pytest.mark.parametrize("shape", [(7,), (5, 9), (1,), (2, 3, 4)])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_equals_the_closed_form(shape, steps):
    nadam = create("nadam", {"betas": (0.9, 0.99), "eps": 1e-3, "momentum_decay": 0.01})
    state, grads = nadam.init_state(shape, CPU), gradients(shape, steps)
    for step, grad in enumerate(grads, 1):
        update = nadam.update(grad, state, step)
    torch.testing.assert_close(update.double(), closed_form(grads, 0.9, 0.99, 1e-3, 0.01), rtol=2e-5, atol=1e-6)
    # negative control: another schedule of mu is noticed
    assert not torch.allclose(update.double(), closed_form(grads, 0.9, 0.99, 1e-3, 4.0), rtol=1e-3)


def test_a_flat_range_has_the_bits_of_the_whole():
    nadam = create("nadam")
    whole, state = gradients((23, 41), 3), nadam.init_state((23, 41), CPU)
    updates = [nadam.update(grad, state, step).reshape(-1) for step, grad in enumerate(whole, 1)]
    for start, end in [(0, 1), (0, 943), (5, 22), (17, 900), (942, 943), (100, 164)]:
        part = nadam.init_state((end - start,), CPU)
        for step, (grad, update) in enumerate(zip(whole, updates, strict=True), 1):
            assert torch.equal(nadam.update(grad.reshape(-1)[start:end], part, step), update[start:end])


def test_without_momentum_the_step_is_the_gradient():
    nadam = create("nadam", {"betas": (0.0, 0.99)})
    state = nadam.init_state((4,), CPU)
    grad = torch.tensor([1.0, -2.0, 3.0, -4.0])
    torch.testing.assert_close(nadam.update(grad, state, 1), grad.sign())
