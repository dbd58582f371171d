"""SOAP: its empty first step, its schedule, failing solvers and its costs (test_twins.py has its twin)."""

from __future__ import annotations

import pytest
import torch

from impl.optimizers.base import create
from tests.unit.matrix_cases import CPU, degenerate, failing, gradients, run

COMMON = {"betas": (0.9, 0.95), "eps": 1e-4, "shampoo_beta": 0.8}


def test_a_side_beyond_the_cap_is_not_rotated():
    _, state = run(create("soap", {**COMMON, "max_side": 6}), gradients((8, 5), 1))
    assert sorted(state) == ["basis.right.0", "factor.right.0", "failures", "fallbacks", "momentum", "second"]


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
    grads = degenerate(kind, gradients((6, 5), 5))
    updates, state = run(create("soap", {"period": 1}), grads)
    assert all(tensor.isfinite().all() for tensor in (*updates, *state.values()))


def test_a_nan_gives_nan_updates_and_no_crash():
    """SOAP has no guard of its own: the run counts as diverged."""
    grads = gradients((6, 5), 6)
    grads[3][1, 2] = float("nan")
    updates, _ = run(create("soap", {"period": 1}), grads)
    assert [bool(update.isnan().any()) for update in updates] == [False] * 3 + [True] * 3


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
