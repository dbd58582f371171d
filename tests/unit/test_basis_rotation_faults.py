"""Basis rotation with gradients and solvers that misbehave."""

from __future__ import annotations

import pytest
import torch

from tests.unit.matrix_cases import CPU, VARIANTS, bases, clone, degenerate, failing, gradients, rotation, run


@pytest.mark.parametrize(("source", "geometry"), VARIANTS)
@pytest.mark.parametrize("kind", ["zero", "rank-1", "zero column", "tiny", "huge"])
def test_degenerate_gradients(source, geometry, kind):
    grads = degenerate(kind, gradients((6, 5), 6), tiny=1e-30)
    updates, state = run(rotation(source=source, geometry=geometry, period=2), grads)
    assert all(update.isfinite().all() for update in updates)
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert int(state["skipped"]) == int(state["failures"]) == 0
    for basis in bases(state).values():
        assert (basis.T @ basis - torch.eye(len(basis))).abs().max() < 1e-5
    if kind == "zero":
        assert not any(update.any() for update in updates)
    if kind == "zero column":
        assert updates[-1][:, 2].abs().max() < 1e-3 < updates[-1].abs().max()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("source", ["1st", "2nd"])
def test_a_bad_gradient_is_skipped_and_counted(source, at, value):
    grads = gradients((6, 5), 7)
    bad = grads[0].clone()
    bad[1, 2] = value
    optimizer = rotation(source=source, period=1)
    clean, expected = run(optimizer, grads)
    first, state = run(optimizer, grads[:at]) if at else ([], optimizer.init_state((6, 5), CPU))
    before = clone(state)
    with pytest.warns(RuntimeWarning, match="not finite"):
        update = optimizer.update(bad, state, at + 1)
    assert not update.any()
    assert int(state["skipped"]) == 1
    assert all(torch.equal(state[key], before[key]) for key in state if key != "skipped")
    rest, state = run(optimizer, grads[at:], state, at + 2)
    assert all(torch.equal(a, b) for a, b in zip(first + rest, clean, strict=True))
    assert all(torch.equal(state[key], expected[key]) for key in state if key != "skipped")


def test_a_bad_gradient_does_not_touch_its_neighbours():
    grads = gradients((6, 5), 3)
    optimizer = rotation(period=1)
    states = [optimizer.init_state((6, 5), CPU) for _ in grads]
    with pytest.warns(RuntimeWarning):
        updates = optimizer.update_many([grads[0], grads[1] * float("nan"), grads[2]], states, 1)
    for i in (0, 2):
        assert torch.equal(updates[i], run(optimizer, [grads[i]])[0][0])
    assert [int(state["skipped"]) for state in states] == [0, 1, 0]


SOLVERS = [("2nd", "eigh", 1), ("1st", "svd", 1), ("2nd", "qr", 4), ("1st", "qr", 4)]


@pytest.mark.parametrize(("source", "solver", "step"), SOLVERS)
def test_a_failed_solver_is_tried_in_float64(source, solver, step, monkeypatch):
    grads = gradients((6, 6), step)
    optimizer = rotation(source=source, period=2, eps=1e-2)
    expected, _ = run(optimizer, grads)
    monkeypatch.setattr(
        torch.linalg, solver, failing(getattr(torch.linalg, solver), lambda x: x.dtype == torch.float32)
    )
    updates, state = run(optimizer, grads)
    torch.testing.assert_close(updates[-1], expected[-1], rtol=1e-3, atol=1e-3)
    assert int(state["failures"]) == 0
    assert int(state["fallbacks"]) == (2 if step > 1 else 1)


@pytest.mark.parametrize(("source", "solver", "step"), SOLVERS)
def test_a_hopeless_solver_keeps_the_basis(source, solver, step, monkeypatch):
    grads = gradients((6, 6), step + 1)
    optimizer = rotation(source=source, period=2)
    _, state = run(optimizer, grads[: step - 1]) if step > 1 else (None, optimizer.init_state((6, 6), CPU))
    before = bases(clone(state))
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, solver, failing(getattr(torch.linalg, solver), lambda x: True))
        update = optimizer.update(grads[step - 1], state, step)
    assert update.isfinite().all()
    assert all(torch.equal(basis, before[key]) for key, basis in bases(state).items())
    assert int(state["failures"]) == 1
    optimizer.update(grads[step], state, step + 1)
    assert int(state["failures"]) == 1
    if step == 1:
        assert int(state["refreshes"]) == 1, "the first basis is tried again at once"


def test_a_failure_in_a_batch_concerns_one_matrix(monkeypatch):
    grads = gradients((16, 16), 3)  # a shape that is batched
    optimizer = rotation(period=1)
    expected = [run(optimizer, [grad])[0][0] for grad in grads]
    poison = grads[1] @ grads[1].T * (1 - 0.999)

    def fails(x):
        return any((matrix.float() - poison).norm() < 1e-5 * poison.norm() for matrix in x)

    monkeypatch.setattr(torch.linalg, "eigh", failing(torch.linalg.eigh, fails))
    states = [optimizer.init_state((16, 16), CPU) for _ in grads]
    updates = optimizer.update_many(grads, states, 1)
    assert [int(state["failures"]) for state in states] == [0, 1, 0]
    assert torch.equal(updates[0], expected[0])
    assert torch.equal(updates[2], expected[2])
    assert [int(state["fallbacks"]) for state in states] == [0, 0, 0]
