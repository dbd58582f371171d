"""Shampoo against closed forms, its schedule, caps and grafting, and the edges (test_twins.py has its twin)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from impl.errors import ConfigError
from impl.optimizers import inverse_root
from impl.optimizers.base import create
from tests.unit import matrix_cases
from tests.unit.matrix_cases import CPU, degenerate, failing

F64 = torch.float64
COMMON = {"momentum": 0.8, "shampoo_beta": 0.9, "ridge": 1e-3}
KEYS = ("left.0", "right.0")


gradients = partial(matrix_cases.gradients, dtype=F64)


def run(settings, grads, state=None, start=1):
    return matrix_cases.run(create("shampoo", settings), grads, state, start)


def root_of(a: Tensor, power: float, ridge: float) -> Tensor:
    """By singular values, which Shampoo itself does not compute."""
    u, s, _ = torch.linalg.svd(a)
    return (u * (s + ridge * s[0]) ** -power) @ u.T


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("root", inverse_root.ROOTS)
def test_fp32_is_near_fp64(root):
    grads = gradients((12, 20), 6)
    expected, _ = run({**COMMON, "period": 2, "root": root}, grads)
    updates, state = run({**COMMON, "period": 2, "root": root}, [g.float() for g in grads])
    assert distance(updates[-1], expected[-1]) < 1e-3
    assert int(state["fallbacks"]) == int(state["failures"]) == 0


@pytest.mark.parametrize("exponent", [0.5, 0.25, 0.125])
@pytest.mark.parametrize("max_side", [100, 7])
def test_the_first_update_has_powers_of_the_singular_values(exponent, max_side):
    """One gradient U S V^T gives ``U S^(1 - 4 exponent) V^T``: by default its polar factor, and from one side too."""
    (grad,) = gradients((7, 9), 1)
    u, s, vt = torch.linalg.svd(grad, full_matrices=False)
    settings = {"exponent": exponent, "ridge": 1e-14, "max_side": max_side}
    ((update,), state) = run(settings, [grad])
    assert ("root.right.0" in state) == (max_side == 100)
    assert distance(update, (u * s ** (1 - 4 * exponent)) @ vt) < 1e-3


@pytest.mark.parametrize(("max_side", "sides"), [(6, (1,)), (5, (1,)), (8, (0, 1)), (4, ())])
def test_a_side_beyond_the_cap_is_not_preconditioned(max_side, sides):
    _, state = run({**COMMON, "max_side": max_side}, gradients((8, 5), 1))
    held = {f"{what}.{KEYS[side]}" for side in sides for what in ("factor", "root")}
    assert set(state) == {"momentum", "failures", "fallbacks"} | held


@pytest.mark.parametrize(("root", "power"), [("eigh", 0.3), *(("coupled-newton", p) for p in (0.5, 0.25, 0.125))])
@pytest.mark.parametrize(("rank", "ridge"), [(20, 1e-6), (3, 1e-6), (1, 1e-4)])
def test_roots(root, power, rank, ridge):
    (x,) = gradients((20, rank), 1)
    found = inverse_root.ROOTS[root]((x @ x.T).unsqueeze(0), power, ridge)[0]
    assert distance(found, root_of(x @ x.T, power, ridge)) < 1e-4
    assert distance(inverse_root.largest_eigenvalue((x @ x.T)[None]), torch.linalg.matrix_norm(x, 2) ** 2) < 1e-2


@pytest.mark.parametrize("root", inverse_root.ROOTS)
def test_roots_of_tiny_and_huge_matrices(root):
    """1e-36 leaves fp32 in products, and its ridge even by itself."""
    (x,) = gradients((6, 6), 1, dtype=torch.float32)
    plain = inverse_root.ROOTS[root]((x @ x.T)[None], 0.25, 1e-4)
    for factor in (1e-36, 1e36):
        scaled = inverse_root.ROOTS[root]((x @ x.T)[None] * factor, 0.25, 1e-4)
        assert distance(scaled * factor**0.25, plain) < 1e-3
    assert torch.equal(inverse_root.ROOTS[root](torch.zeros(1, 3, 3), 0.25, 1e-6)[0], torch.eye(3))


def test_coupled_newton_gives_up_instead_of_returning_rounding():
    (x,) = gradients((64, 4), 1, dtype=torch.float32)
    assert inverse_root.by_newton((x @ x.T)[None], 0.25, 1e-12).isnan().all()
    _, state = run({"root": "coupled-newton", "ridge": 1e-12}, gradients((64, 4), 1, dtype=torch.float32))
    assert int(state["fallbacks"]) == 1, "float64 finds it"
    assert int(state["failures"]) == 0


@pytest.mark.parametrize("grafting", ["sgd", "adam"])
def test_grafted_updates_have_the_others_length(grafting):
    grads = gradients((6, 9), 5, dtype=torch.float32)
    updates, _ = run({"momentum": 0.0, "grafting": grafting, "graft_beta": 0.0, "graft_eps": 1e-30}, grads)
    for update, grad in zip(updates, grads, strict=True):
        length = grad.norm() if grafting == "sgd" else 54**0.5  # Adam's elements are then all -1 or 1
        assert update.norm() == pytest.approx(float(length), rel=1e-5)


def test_roots_are_refreshed_at_step_1_and_on_the_period():
    shampoo = create("shampoo", {"period": 3})
    state, found = shampoo.init_state((6, 5), CPU), []
    for step, grad in enumerate(gradients((6, 5), 10, dtype=torch.float32), 1):
        before = state["root.left.0"].clone()
        shampoo.update(grad, state, step)
        found += [step] if not torch.equal(before, state["root.left.0"]) else []
    assert found == [1, 3, 6, 9]


@pytest.mark.parametrize("root", inverse_root.ROOTS)
@pytest.mark.parametrize("grafting", ["none", "sgd", "adam"])
@pytest.mark.parametrize("kind", ["zero", "rank-1", "zero column", "tiny", "huge", "zero, then not"])
def test_degenerate_gradients(kind, grafting, root):
    grads = degenerate(kind, gradients((6, 5), 5, dtype=torch.float32), huge=1e30)
    updates, state = run({"period": 2, "grafting": grafting, "root": root}, grads)
    assert all(tensor.isfinite().all() for tensor in (*updates, *state.values()))
    assert int(state["failures"]) == 0
    assert int(state["fallbacks"]) == 0 or (kind, root) == ("tiny", "coupled-newton")  # statistics are denormal
    if kind == "zero":
        assert not any(update.any() for update in updates)
    elif kind == "zero column":
        assert updates[-1][:, 2].abs().max() < 1e-3 * updates[-1].abs().max()
    elif kind == "tiny" and grafting == "none":
        plain, _ = run({"period": 2, "root": root}, [g * 1e20 for g in grads])
        assert distance(updates[-1], plain[-1]) < 1e-2, "no floor shrinks it"


def test_a_nan_gives_nan_updates_and_no_crash():
    """Like SOAP it has no guard of its own; the engine keeps such gradients away."""
    grads = gradients((6, 5), 3, dtype=torch.float32)
    grads[1][1, 2] = float("nan")
    updates, state = run({"period": 1}, grads)
    assert [bool(update.isnan().any()) for update in updates] == [False, True, True]
    assert int(state["failures"]) == 4
    assert state["root.left.0"].isfinite().all()


def test_a_failed_eigh_is_tried_in_float64(monkeypatch):
    grads = gradients((6, 5), 3, dtype=torch.float32)
    expected, _ = run({**COMMON, "period": 2}, grads)
    monkeypatch.setattr(torch.linalg, "eigh", failing(torch.linalg.eigh, lambda x: x.dtype == torch.float32))
    updates, state = run({**COMMON, "period": 2}, grads)
    assert distance(updates[-1], expected[-1]) < 1e-3
    assert (int(state["fallbacks"]), int(state["failures"])) == (4, 0)


def test_a_hopeless_eigh_keeps_the_root_and_is_counted(monkeypatch):
    grads = gradients((6, 5), 4, dtype=torch.float32)
    _, state = run({"period": 2}, grads[:1])
    before = {key: state[f"root.{key}"].clone() for key in KEYS}
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", failing(torch.linalg.eigh, lambda x: x.shape[-1] == 6))
        run({"period": 2}, grads[1:3], state, start=2)
    assert torch.equal(state["root.left.0"], before["left.0"])
    assert not torch.equal(state["root.right.0"], before["right.0"]), "the other side goes on"
    assert (int(state["fallbacks"]), int(state["failures"])) == (0, 1)
    run({"period": 2}, grads[3:], state, start=4)
    assert not torch.equal(state["root.left.0"], before["left.0"])
    assert int(state["failures"]) == 1


def test_a_failure_in_a_batch_concerns_one_matrix(monkeypatch):
    grads = gradients((16, 16), 3, dtype=torch.float32)
    expected = [run({}, [grad])[0][0] for grad in grads]
    poison = grads[1] @ grads[1].T
    poison = poison / poison.abs().max()
    monkeypatch.setattr(
        torch.linalg,
        "eigh",
        failing(torch.linalg.eigh, lambda x: any((m.float() - poison).norm() < 1e-5 * poison.norm() for m in x)),
    )
    shampoo = create("shampoo")
    states = [shampoo.init_state((16, 16), CPU) for _ in grads]
    updates = shampoo.update_many(grads, states, 1)
    assert [int(state["failures"]) for state in states] == [0, 1, 0]
    assert torch.equal(updates[0], expected[0])
    assert torch.equal(updates[2], expected[2])


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    "settings", [{}, {"grafting": "adam"}, {"grafting": "sgd"}, {"root": "coupled-newton"}, {"max_side": 40}]
)
def test_a_batch_has_the_bits_of_single_updates(settings, dtype):
    shampoo = create("shampoo", {"period": 2, **settings})
    shapes = [(64, 32), (32, 32), (80, 32), (32, 96), (33, 7), (48, 16)] * 3
    grads = [gradients(shape, 3, seed, dtype=dtype) for seed, shape in enumerate(shapes)]
    many, alone = ([shampoo.init_state(shape, CPU, dtype) for shape in shapes] for _ in range(2))
    for step in range(1, 4):
        together = shampoo.update_many([g[step - 1] for g in grads], many, step)
        for i, update in enumerate(together):
            assert torch.equal(update, shampoo.update(grads[i][step - 1], alone[i], step))
            assert all(torch.equal(many[i][key], alone[i][key]) for key in alone[i])


def test_costs_by_hand():
    shampoo = create("shampoo", {"period": 10, "max_side": 100})
    assert shampoo.flops((60, 40)) == pytest.approx(4 * 60 * 40 * (60 + 40) + 2.5 * (60**3 + 40**3))
    assert shampoo.flops((200, 40)) == pytest.approx(4 * 200 * 40 * 40 + 2.5 * 40**3)
    assert shampoo.state_bytes((60, 40)) == 4 * 60 * 40 + 8 * (60 * 60 + 40 * 40) + 8
    assert create("shampoo", {"grafting": "sgd"}).state_bytes((60, 40)) == shampoo.state_bytes((60, 40))
    assert create("shampoo", {"grafting": "adam"}).state_bytes((60, 40)) == shampoo.state_bytes((60, 40)) + 4 * 60 * 40
    newton = create("shampoo", {"root": "coupled-newton", "period": 1})
    assert newton.flops((60, 40)) == pytest.approx(4 * 60 * 40 * 100 + 2 * 4 * 22 * (60**3 + 40**3))


def test_health_sees_the_condition():
    shampoo, grads = create("shampoo"), gradients((6, 5), 1, dtype=torch.float32)
    updates, state = run({}, grads)
    expected = (torch.linalg.svdvals(grads[0]).square() + 1e-6 * torch.linalg.matrix_norm(grads[0], 2) ** 2).tolist()
    found = shampoo.health(state, updates[0])["condition"]  # of the left side, which has one eigenvalue of 0
    assert found == pytest.approx(1e6, rel=0.2)
    assert found > expected[0] / expected[-1]
    state["factor.left.0"][0, 0] = float("nan")
    assert shampoo.health(state, updates[0])["condition"] > shampoo.health_metrics["condition"]


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        ({"exponents": 0.25}, "did you mean 'exponent'"),
        ({"root": "newton"}, "root.*'eigh' or 'coupled-newton'"),
        ({"root": "coupled-newton", "exponent": 0.3}, "root: .*coupled-newton needs an exponent of 1 / an even number"),
        ({"root": "coupled-newton", "exponent": 1.0}, "root: .*1 / an even number"),
        ({"grafting": "lion"}, "grafting.*'none', 'sgd' or 'adam'"),
        ({"ridge": 0.0}, "ridge.*greater than 0"),
    ],
)
def test_bad_settings_are_refused(settings, hint):
    with pytest.raises(ConfigError, match=hint):
        create("shampoo", settings)


def test_only_matrices():
    shampoo = create("shampoo")
    with pytest.raises(ValueError, match="shampoo updates matrices"):
        shampoo.init_state((5,), CPU)
    with pytest.raises(ValueError, match="adamw"):
        shampoo.update(torch.ones(2, 3, 4), {}, 1)
    assert shampoo.flops((5,)) == 0
