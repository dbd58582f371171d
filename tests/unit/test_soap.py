"""SOAP against a float64 twin, its empty first step, its schedule and its costs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from impl.optimizers import eigenbasis
from impl.optimizers.base import create

CPU = torch.device("cpu")
COMMON = {"betas": (0.9, 0.95), "eps": 1e-4, "shampoo_beta": 0.8}


def gradients(shape, count, seed=0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    m, n = shape
    left, right = torch.randn(m, m, generator=generator), torch.randn(n, n, generator=generator)
    return [left @ torch.randn(m, n, generator=generator) @ right / (m * n) ** 0.5 for _ in range(count)]


def run(soap, grads):
    state = soap.init_state(tuple(grads[0].shape), CPU)
    return [soap.update(grad, state, step) for step, grad in enumerate(grads, 1)], state


def first_bases(grads):
    """The optimizer's own, as eigenvectors of equal eigenvalues are not unique; another test checks them."""
    _, state = run(create("soap", COMMON), grads[:1])
    return {0: state["basis.left.0"].double(), 1: state["basis.right.0"].double()}


def twin(grads, period, betas, eps, shampoo_beta, sides=(0, 1)) -> list[Tensor]:
    """All updates in float64, as in the authors' code: the momentum is kept rotated and carried from basis to basis."""
    start = first_bases(grads)
    b1, b2 = betas
    average, basis, out = {}, {}, []
    shape = grads[0].shape
    first, second = torch.zeros(shape).double(), torch.zeros(shape).double()

    def turn(x, back=False):
        u, v = (basis.get(side, torch.eye(shape[side]).double()) for side in (0, 1))
        return u @ x @ v.T if back else u.T @ x @ v

    for t, grad in enumerate(grads):
        g = grad.double()
        if t == 0:
            out.append(torch.zeros_like(g))
        else:
            rotated = turn(g)
            first = b1 * first + (1 - b1) * rotated
            second = b2 * second + (1 - b2) * rotated**2
            out.append(turn(first / (second.sqrt() + eps), back=True) * (1 - b2**t) ** 0.5 / (1 - b1**t))
        original = turn(first, back=True) if t else first
        for side in sides:
            x = g if side == 0 else g.T
            average[side] = shampoo_beta * average.get(side, 0) + (1 - shampoo_beta) * x @ x.T
            if t == 0:
                basis[side] = start[side]
            elif t % period == 0:
                q = basis[side]
                order = torch.argsort((q.T @ average[side] @ q).diag(), descending=True)
                second = second.index_select(side, order)
                basis[side] = torch.linalg.qr(average[side] @ q[:, order])[0]
        first = turn(original)
    return out


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("shape", [(6, 6), (5, 7), (7, 5)])
def test_equals_the_twin(shape, period):
    grads = gradients(shape, 11)
    updates, _ = run(create("soap", {**COMMON, "period": period}), grads)
    expected = twin(grads, period, **COMMON)
    for update, right in zip(updates[1:], expected[1:], strict=True):
        assert (update - right).norm() < 3e-3 * right.norm()
    wrong = twin(grads, period + 1, **COMMON)
    assert (updates[-1] - wrong[-1]).norm() > 0.02 * wrong[-1].norm(), "negative control"


def test_the_twin_notices_an_order_that_leaves_the_second_moment_behind(monkeypatch):
    monkeypatch.setattr(eigenbasis, "permute", lambda second, block, order: None)
    grads = gradients((6, 6), 11)
    updates, _ = run(create("soap", {**COMMON, "period": 1}), grads)
    assert (
        max(float((u - e).norm() / e.norm()) for u, e in zip(updates[1:], twin(grads, 1, **COMMON)[1:], strict=True))
        > 0.05
    )


def test_a_side_beyond_the_cap_is_not_rotated():
    grads = gradients((8, 5), 9)
    soap = create("soap", {**COMMON, "period": 2, "max_side": 6})
    updates, state = run(soap, grads)
    assert sorted(state) == ["basis.right.0", "factor.right.0", "failures", "fallbacks", "momentum", "second"]
    for update, right in zip(updates[1:], twin(grads, 2, **COMMON, sides=(1,))[1:], strict=True):
        assert (update - right).norm() < 3e-3 * right.norm()


def test_the_first_step_only_builds_the_bases():
    updates, state = run(create("soap"), gradients((5, 4), 1))
    assert not updates[0].any()
    assert not state["momentum"].any()
    assert not state["second"].any()
    for key in ("left.0", "right.0"):
        basis, factor = state[f"basis.{key}"], state[f"factor.{key}"]
        eigenvalues = torch.linalg.eigvalsh(factor).flip(0)
        torch.testing.assert_close(basis.T @ factor @ basis, eigenvalues.diag(), rtol=1e-4, atol=1e-5)


def test_refreshes_follow_the_steps_that_updated():
    """The basis is built at step 1, whose update is empty, and turned after every third update that is not."""
    soap = create("soap", {"period": 3})
    state, found = soap.init_state((6, 5), CPU), []
    for step, grad in enumerate(gradients((6, 5), 11), 1):
        before = state["basis.left.0"].clone()
        soap.update(grad, state, step)
        found += [step] if not torch.equal(before, state["basis.left.0"]) else []
    assert found == [1, 4, 7, 10]


def test_bases_stay_orthogonal():
    _, state = run(create("soap", {"period": 1}), gradients((40, 24), 25))
    for key in ("basis.left.0", "basis.right.0"):
        assert (state[key].T @ state[key] - torch.eye(len(state[key]))).abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["zero", "rank-1", "zero column"])
def test_degenerate_gradients(kind):
    grads = gradients((6, 5), 5)
    if kind == "zero":
        grads = [g * 0 for g in grads]
    elif kind == "rank-1":
        grads = [torch.outer(g[:, 0], g[0]) for g in grads]
    else:
        for g in grads:
            g[:, 2] = 0
    updates, state = run(create("soap", {"period": 1}), grads)
    assert all(tensor.isfinite().all() for tensor in (*updates, *state.values()))


def test_a_nan_gives_nan_updates_and_no_crash():
    """SOAP has no guard of its own: the run counts as diverged."""
    grads = gradients((6, 5), 6)
    grads[3][1, 2] = float("nan")
    updates, _ = run(create("soap", {"period": 1}), grads)
    assert [bool(update.isnan().any()) for update in updates] == [False] * 3 + [True] * 3


def failing(function, fails):
    def wrapped(x, *args, **kwargs):
        if fails(x):
            raise torch.linalg.LinAlgError("did not converge")
        return function(x, *args, **kwargs)

    return wrapped


@pytest.mark.parametrize(("solver", "step"), [("eigh", 1), ("qr", 3)])
def test_a_failed_solver_is_tried_in_float64(solver, step, monkeypatch):
    grads, soap = gradients((6, 6), step + 1), create("soap", {**COMMON, "period": 2})
    expected, _ = run(soap, grads)
    plain = getattr(torch.linalg, solver)
    monkeypatch.setattr(torch.linalg, solver, failing(plain, lambda x: x.dtype == torch.float32))
    updates, state = run(soap, grads)
    torch.testing.assert_close(updates[-1], expected[-1], rtol=1e-3, atol=1e-3)
    assert (int(state["fallbacks"]), int(state["failures"])) == (2, 0), "once for each side"


@pytest.mark.parametrize(("solver", "step"), [("eigh", 1), ("qr", 3)])
def test_a_hopeless_solver_keeps_the_basis_and_is_counted(solver, step, monkeypatch):
    grads, soap = gradients((6, 5), step + 1), create("soap", {"period": 2})
    state = soap.init_state((6, 5), CPU)
    for t, grad in enumerate(grads, 1):
        before = {key: tensor.clone() for key, tensor in state.items()}
        with monkeypatch.context() as patch:
            if t == step:
                patch.setattr(torch.linalg, solver, failing(getattr(torch.linalg, solver), lambda x: x.shape[-1] == 6))
            update = soap.update(grad, state, t)
        if t == step:
            assert torch.equal(state["basis.left.0"], before["basis.left.0"])
            assert not torch.equal(state["basis.right.0"], before["basis.right.0"]), "the other side goes on"
        assert update.isfinite().all()
    assert (int(state["fallbacks"]), int(state["failures"])) == (0, 1)


def test_health_sees_a_basis_that_is_not_orthogonal():
    soap = create("soap", {"period": 2})
    updates, state = run(soap, gradients((6, 5), 4))
    found = soap.health(state, updates[-1])
    assert found["orthogonality"] < 1e-5
    assert 1 < found["condition"] <= soap.health_metrics["condition"]
    state["basis.right.0"][:, 2] *= 1.01
    assert soap.health(state, updates[-1])["orthogonality"] == pytest.approx(0.0201, rel=1e-2)
    assert soap.health_metrics["orthogonality"] < 0.0201


def test_a_batch_has_the_bits_of_single_updates():
    soap = create("soap", {"period": 2})
    shapes = [(64, 32), (32, 32), (192, 32), (32, 96)] * 3
    grads = [gradients(shape, 4, seed) for seed, shape in enumerate(shapes)]
    many, alone = ([soap.init_state(shape, CPU) for shape in shapes] for _ in range(2))
    for step in range(1, 5):
        together = soap.update_many([g[step - 1] for g in grads], many, step)
        for i, update in enumerate(together):
            assert torch.equal(update, soap.update(grads[i][step - 1], alone[i], step))
            assert all(torch.equal(many[i][key], alone[i][key]) for key in alone[i])


def test_costs_by_hand():
    """Canzona's count, and fp32 moments, covariances and bases."""
    soap = create("soap", {"period": 10, "max_side": 100})
    square, cut = 22 / 3 * (60**3 + 40**3) / 10, 22 / 3 * 40**3 / 10
    assert soap.flops((60, 40)) == pytest.approx(8 * 60 * 60 * 40 + 8 * 60 * 40 * 40 + square)
    assert soap.flops((200, 40)) == pytest.approx(8 * 200 * 40 * 40 + cut)
    assert soap.state_bytes((60, 40)) == 8 * 60 * 40 + 8 * (60 * 60 + 40 * 40) + 8
    assert soap.state_bytes((200, 40)) == 8 * 200 * 40 + 8 * 40 * 40 + 8


def test_only_matrices():
    with pytest.raises(ValueError, match="soap updates matrices"):
        create("soap").init_state((5,), CPU)
    assert create("soap").flops((5,)) == 0
