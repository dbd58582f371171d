"""AdamW against its closed form (test_oracles.py has torch.optim.AdamW), and on pieces of a tensor."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from impl.errors import ConfigError
from impl.optimizers.base import create

CPU = torch.device("cpu")


def gradients(shape, count, seed=0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * 10.0 ** -(i % 3) for i in range(count)]


def closed_form(grads, beta1, beta2, eps) -> Tensor:
    """The last update in float64, from sums over the whole history instead of a recurrence."""
    t = len(grads)
    first = sum((1 - beta1) * beta1 ** (t - i) * g.double() for i, g in enumerate(grads, 1))
    second = sum((1 - beta2) * beta2 ** (t - i) * g.double() ** 2 for i, g in enumerate(grads, 1))
    return (first / (1 - beta1**t)) / ((second / (1 - beta2**t)) ** 0.5 + eps)


@pytest.mark.parametrize("shape", [(7,), (5, 9), (1,), (2, 3, 4)])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_equals_the_closed_form(shape, steps):
    adamw = create("adamw", {"betas": (0.8, 0.99), "eps": 1e-3})
    state = adamw.init_state(shape, CPU)
    grads = gradients(shape, steps)
    for step, grad in enumerate(grads, 1):
        update = adamw.update(grad, state, step)
    torch.testing.assert_close(update.double(), closed_form(grads, 0.8, 0.99, 1e-3), rtol=2e-5, atol=1e-6)
    # negative control: bias correction of another step is noticed
    assert not torch.allclose(update.double(), closed_form([*grads, grads[-1] * 0], 0.8, 0.99, 1e-3), rtol=1e-3)


def test_a_flat_range_has_the_bits_of_the_whole():
    """ZeRO-1 cuts anywhere, so vector and scalar code paths must agree at every position and length."""
    adamw = create("adamw")
    whole, state = gradients((23, 41), 3), adamw.init_state((23, 41), CPU)
    updates = [adamw.update(g, state, step) for step, g in enumerate(whole, 1)]
    size = 23 * 41
    for low, high in [(0, 1), (1, 2), (3, 100), (17, 50), (64, 128), (5, size), (0, size - 3), (301, 942), (7, 15)]:
        part = adamw.init_state((high - low,), CPU)
        for step, (grad, update) in enumerate(zip(whole, updates, strict=True), 1):
            got = adamw.update(grad.view(-1)[low:high], part, step)
            assert torch.equal(got, update.view(-1)[low:high])


def test_zero_gives_exact_zero():
    adamw = create("adamw")
    state = adamw.init_state((6,), CPU)
    for step in (1, 2):
        assert torch.equal(adamw.update(torch.zeros(6), state, step), torch.zeros(6))


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"beta": 0.9}, "did you mean 'betas'.*known are betas, eps"),
        ({"betas": [0.9, 1.0]}, "betas.1.*less than 1"),
        ({"betas": [0.9]}, "betas"),
        ({"eps": 0.0}, "eps.*greater than 0"),
    ],
)
def test_bad_settings_are_refused(settings, hint):
    with pytest.raises(ConfigError, match=hint):
        create("adamw", settings)
