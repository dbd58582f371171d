"""Muon against a slow float64 twin and against torch.optim.Muon, and its behaviour at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from impl.errors import ConfigError
from impl.optimizers.base import create
from impl.optimizers.muon import SCALES
from impl.optimizers.newton_schulz import COEFFICIENT_SETS

SHAPES = [(8, 8), (16, 6), (6, 16), (7, 13), (13, 7), (1, 9), (9, 1), (1, 1), (96, 32), (33, 129)]


def gradients(shape, count=1, seed=0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for _ in range(count)]


def run(grads, **settings) -> Tensor:
    """The last update of a fresh Muon."""
    muon = create("muon", settings)
    state = muon.init_state(tuple(grads[0].shape), torch.device("cpu"))
    for step, grad in enumerate(grads, 1):
        update = muon.update(grad, state, step)
    return update


def twin(grads, coefficients, steps=5, beta=0.95, nesterov=True, factor=1.0) -> Tensor:
    """The last update by the formula alone: float64, singular values through the polynomials, no matrix iteration."""
    momentum = torch.zeros_like(grads[0], dtype=torch.float64)
    for grad in grads:
        momentum = beta * momentum + (1 - beta) * grad.double()
    direction = beta * momentum + (1 - beta) * grads[-1].double() if nesterov else momentum
    u, s, vt = torch.linalg.svd(direction, full_matrices=False)
    s = s / s.square().sum().sqrt()
    table = list(coefficients) + [coefficients[-1]] * steps
    for a, b, c in table[:steps]:
        s = a * s + b * s**3 + c * s**5
    return factor * (u * s) @ vt


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 2e-6), ("float32", 1e-4), ("bfloat16", 0.06)])
def test_equals_the_twin(shape, dtype, bound):
    grads = gradients(shape, 4)
    expected = twin(grads, COEFFICIENT_SETS["simple"], factor=0.2 * math.sqrt(max(shape)))
    assert distance(run(grads, ns_dtype=dtype), expected) < bound


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
@pytest.mark.parametrize("steps", [1, 3, 10])
def test_coefficients_are_used_in_order_and_the_last_repeated(name, steps):
    grads = gradients((12, 20), 2)
    expected = twin(grads, COEFFICIENT_SETS[name], steps=steps)
    got = run(grads, coefficients=name, ns_steps=steps, scale="none", ns_dtype="float64")
    assert distance(got, expected) < 1e-5
    if 1 < steps < len(COEFFICIENT_SETS[name]):  # negative control: the order matters
        assert distance(got, twin(grads, COEFFICIENT_SETS[name][::-1], steps=steps)) > 1e-2


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_every_set_orthogonalises(name):
    singular = torch.linalg.svdvals(run(gradients((32, 48)), coefficients=name, scale="none", ns_steps=8).double())
    assert singular.min() > 0.6
    assert singular.max() < 1.3


def test_momentum_without_nesterov():
    grads = gradients((10, 14), 3)
    expected = twin(grads, COEFFICIENT_SETS["simple"], beta=0.7, nesterov=False)
    assert distance(run(grads, momentum=0.7, nesterov=False, scale="none", ns_dtype="float64"), expected) < 1e-5


@pytest.mark.parametrize("shape", [(12, 3), (3, 12), (5, 5)])
def test_scale_rules(shape):
    m, n = shape
    grads = gradients(shape)
    plain = run(grads, scale="none")
    for name, factor in {
        "original": (m / n) ** 0.5 if m > n else 1.0,
        "match-rms": 0.2 * max(m, n) ** 0.5,
        "spectral": max(m, n) ** 0.5,
    }.items():
        torch.testing.assert_close(run(grads, scale=name), plain * factor)
    assert set(SCALES) == {"original", "match-rms", "spectral", "none"}


def torch_muon(grads, **options) -> Tensor:
    """The last update of torch.optim.Muon at learning rate 1 without decay."""
    parameter = torch.nn.Parameter(torch.zeros_like(grads[0]))
    optimizer = torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, **options)
    for grad in grads:
        parameter.data.zero_()
        parameter.grad = grad.clone()
        optimizer.step()
    return -parameter.detach()


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (64, 64), (96, 32)])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("ours", "theirs"), [("match-rms", "match_rms_adamw"), ("original", "original")])
def test_torch_parity(shape, nesterov, ours, theirs):
    grads = gradients(shape, 5)
    options = {"adjust_lr_fn": theirs, "nesterov": nesterov}
    got = run(grads, scale=ours, nesterov=nesterov)
    assert distance(got, torch_muon(grads, **options)) < 0.04
    # negative control: the same bound notices a wrong momentum
    assert distance(run(grads, scale=ours, nesterov=not nesterov), torch_muon(grads, **options)) > 0.04


@pytest.mark.parametrize("shape", [(16, 64), (16, 16), (32, 128)])
def test_torch_parity_to_the_last_bit(shape):
    """Where the normalisation rounds nowhere (signs, a norm that is a power of two) the bf16 products are torch's."""
    grad = gradients(shape)[0].sign()
    theirs = torch_muon([grad], momentum=0.0, nesterov=False, adjust_lr_fn="original")
    assert torch.equal(run([grad], momentum=0.0, nesterov=False, scale="original"), theirs)


@pytest.mark.parametrize("factor", [1e-6, 1e-10, 1e-20, 1e-30, 1e10, 1e30])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
def test_scale_invariant(factor, shape):
    grads = gradients(shape, 3)
    scaled = [g * factor for g in grads]
    assert distance(run(scaled), run(grads)) < 1e-2
    assert distance(run(scaled, ns_dtype="float32"), run(grads, ns_dtype="float32")) < 1e-4


@pytest.mark.parametrize("factor", [1e-10, 1e-20])
def test_an_eps_floor_would_break_it(factor):
    """Negative control: torch's floor of 1e-7 shrinks the update that ours keeps."""
    grads = gradients((24, 40), 3)
    scaled = [g * factor for g in grads]
    assert distance(torch_muon(scaled), torch_muon(grads)) > 1e-2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_zero_gives_exact_zero(dtype):
    update = run([torch.zeros(5, 9)] * 2, ns_dtype=dtype)
    assert torch.equal(update, torch.zeros(5, 9))


@pytest.mark.parametrize("name", COEFFICIENT_SETS)
def test_deficient_gradients_stay_finite(name):
    rank_one = gradients((16, 1))[0] @ gradients((1, 24), seed=1)[0]
    column = gradients((16, 24))[0]
    column[:, 3] = 0.0
    lone = torch.zeros(16, 24)
    lone[2, 5] = 1e-38
    for grad in (rank_one, column, lone):
        update = run([grad], coefficients=name, scale="none")
        assert update.isfinite().all()
        assert 0.5 < torch.linalg.matrix_norm(update, 2) < 1.6
    assert torch.equal(run([column], coefficients=name)[:, 3], torch.zeros(16))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients_are_not_hidden(bad):
    (grad,) = gradients((6, 4))
    grad[1, 1] = bad
    assert run([grad]).isnan().any()


@pytest.mark.parametrize("nesterov", [True, False])
def test_newton_schulz_leaves_the_momentum_alone(nesterov):
    """torch.optim.Muon normalises a bf16 momentum in place; ours holds the plain average."""
    muon = create("muon", {"nesterov": nesterov, "momentum": 0.5})
    state = muon.init_state((6, 10), torch.device("cpu"))
    grads = gradients((6, 10), 3)
    expected = torch.zeros(6, 10)
    for step, grad in enumerate(grads, 1):
        muon.update(grad, state, step)
        expected = 0.5 * expected + 0.5 * grad
    torch.testing.assert_close(state["momentum"], expected)


def test_bits_do_not_depend_on_where_the_gradient_lies():
    (grad,) = gradients((24, 40))
    expected = run([grad])
    for offset in (1, 3, 7, 16, 33):
        buffer = torch.full((grad.numel() + 64,), 5.0)
        view = buffer[offset : offset + grad.numel()].view(24, 40)
        view.copy_(grad)
        assert torch.equal(run([view]), expected)


@pytest.mark.parametrize("shape", [(20, 8), (8, 20)])
def test_the_update_is_contiguous(shape):
    assert run(gradients(shape)).is_contiguous()


def test_costs():
    muon = create("muon", {"ns_steps": 5})
    assert muon.flops((51200, 5120)) == 5 * (4 * 51200 * 5120**2 + 2 * 5120**3)
    assert muon.flops((5120, 51200)) == muon.flops((51200, 5120))
    assert muon.published_flops((6400, 5120)) == 20 * 6400 * 5120**2
    assert muon.published_flops((5120,)) == muon.flops((5120,)) == 0
    assert create("muon", {"ns_steps": 8}).published_flops((4, 4)) == 32 * 64
    assert muon.state_bytes((3, 5)) == 60


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"nesterow": True}, "did you mean 'nesterov'.*known are coefficients, momentum, nesterov, ns_dtype, ns_steps"),
        ({"coefficients": "cubic"}, "coefficients.*'simple', 'quintic', 'polar-express', 'aol' or 'qwen-express'"),
        ({"scale": "rms"}, "scale.*'original', 'match-rms', 'spectral' or 'none'"),
        ({"ns_steps": 0}, "ns_steps.*greater than 0"),
        ({"momentum": 1.0}, "momentum.*less than 1"),
    ],
)
def test_bad_settings_are_refused(settings, hint):
    with pytest.raises(ConfigError, match=hint):
        create("muon", settings)


def test_only_matrices():
    muon = create("muon")
    with pytest.raises(ValueError, match="adamw"):
        muon.init_state((4,), torch.device("cpu"))
    with pytest.raises(ValueError, match="adamw"):
        muon.update(torch.ones(2, 3, 4), {"momentum": torch.zeros(2, 3, 4)}, 1)
