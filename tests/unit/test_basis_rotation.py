"""Basis rotation against Adam and SOAP; its invariances, its schedule and its options (test_twins.py has its twin)."""

from __future__ import annotations

import pytest
import torch

from impl.optimizers.base import create
from impl.optimizers.soap import Soap, SoapHyper
from tests.unit.matrix_cases import CPU, VARIANTS, bases, clone, gradients, rotation, run


@pytest.mark.parametrize("beyond", ["unrotated", "blocks"])
def test_without_rotation_it_is_adam(beyond):
    """Blocks of one element have bases of plus or minus one."""
    grads = gradients((5, 7), 8)
    updates, _ = run(rotation(max_side=1, beyond=beyond, period=2, eps=1e-30), grads)
    parameter = torch.nn.Parameter(torch.zeros(5, 7))
    adam = torch.optim.Adam([parameter], lr=1.0, betas=(0.9, 0.999), eps=1e-30)
    for grad, update in zip(grads, updates, strict=True):
        before = parameter.detach().clone()
        parameter.grad = grad.clone()
        adam.step()
        torch.testing.assert_close(update, before - parameter.detach(), rtol=1e-5, atol=2e-5)


def test_eps_is_added_to_the_uncorrected_root():
    grad = torch.full((2, 2), 1e-6)
    (update,), _ = run(rotation(max_side=1, eps=1e-6), [grad])
    root = 0.001**0.5
    torch.testing.assert_close(update, torch.full((2, 2), root * 1e-6 / (root * 1e-6 + 1e-6)), rtol=1e-4, atol=0)


@pytest.mark.parametrize("next_step", [7, 8], ids=["kept", "refreshed"])
@pytest.mark.parametrize(("source", "geometry"), VARIANTS)
def test_signs_and_order_of_the_basis_do_not_matter(source, geometry, next_step):
    optimizer = rotation(source=source, geometry=geometry, period=4, eps=1e-4)
    grads = gradients((6, 9), 7)
    _, state = run(optimizer, grads[:6])
    generator = torch.Generator().manual_seed(5)
    changed, broken = clone(state), clone(state)
    for key, basis in bases(state).items():
        order = torch.randperm(len(basis), generator=generator)
        signs = torch.randint(0, 2, (len(basis),), generator=generator) * 2.0 - 1
        changed[key] = (basis * signs)[:, order]
        broken[key] = basis[:, order]
        second = changed["second"]
        changed["second"] = second[order] if key.startswith("basis.left") else second[:, order]
    expected = optimizer.update(grads[6], state, next_step)
    torch.testing.assert_close(optimizer.update(grads[6], changed, next_step), expected, rtol=1e-3, atol=1e-4)
    assert (optimizer.update(grads[6], broken, next_step) - expected).norm() > 0.05 * expected.norm()


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (1, 6)])
@pytest.mark.parametrize(("source", "geometry"), VARIANTS)
def test_bases_stay_orthogonal(source, geometry, shape):
    _, state = run(rotation(source=source, geometry=geometry, period=1), gradients(shape, 25))
    assert len(bases(state)) == (2 if geometry == "bilateral" else 1)
    for basis in bases(state).values():
        assert (basis.T @ basis - torch.eye(len(basis))).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("settings", "index", "expected"),
    [
        ({}, 2, [1, 3, 6, 9]),
        ({"offset": 1}, 2, [1, 2, 5, 8]),
        ({"offset": 3}, 2, [1, 3, 6, 9]),
        ({"stagger": True}, 2, [1, 2, 5, 8]),
        ({"stagger": True}, 4, [1, 4, 7]),
        ({"period": 1}, 2, list(range(1, 10))),
    ],
)
@pytest.mark.parametrize(("source", "geometry"), VARIANTS)
@pytest.mark.parametrize("shape", [(6, 6), (8, 4), (4, 8)])
def test_refreshes_fall_on_the_period(source, geometry, shape, settings, index, expected):
    """The released code refreshes unilateral bases at every step."""
    optimizer = rotation(source=source, geometry=geometry, **{"period": 3, **settings})
    state, found = optimizer.init_state(shape, CPU), []
    optimizer.place(state, index)
    for step, grad in enumerate(gradients(shape, 9), 1):
        before = bases(clone(state))
        optimizer.update(grad, state, step)
        changed = {key: not torch.equal(basis, before[key]) for key, basis in bases(state).items()}
        assert len(set(changed.values())) == 1
        found += [step] if all(changed.values()) else []
    assert found == expected
    assert int(state["refreshes"]) == len(expected)


@pytest.mark.parametrize(("shape", "key"), [((4, 8), "left.0"), ((8, 4), "right.0"), ((6, 6), "right.0")])
def test_unilateral_rotates_the_shorter_side(shape, key):
    state = rotation(geometry="unilateral").init_state(shape, CPU)
    assert list(bases(state)) == [f"basis.{key}"]


class EarlySoap(Soap):
    """SOAP with basis rotation's order: no empty first step, covariances and bases before the step that uses them."""

    def update_many(self, grads, states, step):
        stacked = torch.stack(list(grads))
        parts = self._blocks(tuple(grads[0].shape))
        self._follow(stacked, states, 0 if step == 1 else step, parts)
        return list(self._step(stacked, states, step, parts))


@pytest.mark.parametrize("period", [1, 4])
def test_equals_soap_with_its_order_of_operations(period):
    common = {"betas": (0.9, 0.99), "period": period, "eps": 1e-3}
    grads = gradients((7, 7), 13)
    updates, _ = run(rotation(**common), grads)
    aligned, _ = run(EarlySoap(SoapHyper(**common)), grads)
    for ours, theirs in zip(updates, aligned, strict=True):
        assert (ours - theirs).norm() < 1e-3 * theirs.norm()
    plain, _ = run(create("soap", common), grads)
    assert (plain[-1] - updates[-1]).norm() > 0.05 * updates[-1].norm(), "negative control: SOAP's own order differs"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 5e-3), ("bfloat16", 5e-2)])
@pytest.mark.parametrize("source", ["1st", "2nd"])
def test_half_precision_bases(source, dtype, tolerance):
    """The updates of 20 steps stay within the tolerance of fp32's; without rotation they are far away."""
    grads = gradients((12, 9), 20)
    common = {"source": source, "period": 2, "eps": 1e-4}
    full, _ = run(rotation(**common), grads)
    optimizer = rotation(**common, basis_dtype=dtype)
    half, state = run(optimizer, grads)
    adam, _ = run(rotation(max_side=1), grads)
    held = [tensor for key, tensor in state.items() if key.startswith("basis.")]
    assert {tensor.dtype for tensor in held} == {getattr(torch, dtype)}
    assert optimizer.state_bytes((12, 9)) == sum(t.numel() * t.element_size() for t in state.values())
    for step in range(20):
        assert (half[step] - full[step]).norm() < tolerance * full[step].norm()
    assert (adam[-1] - full[-1]).norm() > 0.3 * full[-1].norm()
    for basis in bases(state).values():
        assert (basis.T @ basis - torch.eye(len(basis))).abs().max() < 1e-2


@pytest.mark.parametrize(("shape", "keys"), [((7, 3), ["left.0", "left.3", "left.6", "right.0"]), ((3, 2), None)])
@pytest.mark.parametrize("source", ["1st", "2nd"])
def test_blocks_beyond_the_longest_side(source, shape, keys):
    optimizer = rotation(source=source, max_side=3, beyond="blocks", period=2)
    grads = gradients(shape, 8)
    updates, state = run(optimizer, grads)
    assert list(bases(state)) == [f"basis.{key}" for key in keys or ["left.0", "right.0"]]
    assert optimizer.state_bytes(shape) == sum(t.numel() * t.element_size() for t in state.values())
    whole, _ = run(rotation(source=source, period=2), grads)
    assert torch.equal(updates[-1], whole[-1]) == (keys is None)


def test_blocks_of_the_left_side_are_matrices_of_their_own():
    """Each follows its own rows alone."""
    grads = gradients((8, 4), 6)
    halves = [run(rotation(max_side=4, period=2, beyond="unrotated"), [g[i : i + 4] for g in grads]) for i in (0, 4)]
    _, state = run(rotation(max_side=4, period=2, beyond="blocks"), grads)
    for i, (_, half) in zip((0, 4), halves, strict=True):
        torch.testing.assert_close(state[f"factor.left.{i}"], half["factor.left.0"])
        torch.testing.assert_close(state[f"basis.left.{i}"].abs(), half["basis.left.0"].abs(), rtol=1e-4, atol=1e-4)


def test_a_side_beyond_the_cap_stays_unrotated():
    state = rotation(max_side=5).init_state((6, 5), CPU)
    assert list(bases(state)) == ["basis.right.0"]


@pytest.mark.parametrize("settings", [{}, {"source": "1st"}, {"max_side": 40, "beyond": "blocks"}, {"nesterov": True}])
def test_a_batch_has_the_bits_of_single_updates(settings):
    """On the shapes of a small transformer, over refreshes; with stagger the batches fall apart differently."""
    optimizer = rotation(period=2, stagger=True, **settings)
    shapes = [(64, 32), (32, 32), (192, 32), (32, 96)] * 3
    grads = [gradients(shape, 4, seed) for seed, shape in enumerate(shapes)]
    many = [optimizer.init_state(shape, CPU) for shape in shapes]
    for i, state in enumerate(many):
        optimizer.place(state, i // 4)
    alone = [clone(state) for state in many]
    for step in range(1, 5):
        together = optimizer.update_many([g[step - 1] for g in grads], many, step)
        for i, update in enumerate(together):
            assert torch.equal(update, optimizer.update(grads[i][step - 1], alone[i], step))
            assert all(torch.equal(many[i][key], alone[i][key]) for key in alone[i])


def test_gain_scales_the_update():
    grads = gradients((4, 6), 2)
    plain, louder = (run(rotation(gain=gain), grads)[0][-1] for gain in (1.0, 1.5))
    torch.testing.assert_close(louder, 1.5 * plain)


def test_flops_and_bytes_by_hand():
    shape, m, n = (6, 4), 6, 4
    projections = 6 * (m * m * n + m * n * n)
    qr = 8 / 3 * (m**3 + n**3)
    covariances, products = 2 * (m * m * n + m * n * n), m**3 + n**3
    second, first = rotation(period=5), rotation(period=5, source="1st")
    assert second.flops(shape) == pytest.approx(12 * m * n + projections + covariances + (2 * products + qr) / 5)
    assert second.published_flops(shape) == pytest.approx(second.flops(shape) + 4 * products / 5)
    assert first.flops(shape) == pytest.approx(12 * m * n + projections + (2 * covariances + qr) / 5)
    assert second.state_bytes(shape) == 8 * m * n + 8 * (m * m + n * n) + 20
    assert first.state_bytes(shape) == 8 * m * n + 4 * (m * m + n * n) + 20
    assert rotation(geometry="unilateral").state_bytes(shape) == 8 * m * n + 8 * n * n + 20


def test_only_matrices():
    with pytest.raises(ValueError, match="basis-rotation updates matrices"):
        rotation().init_state((5,), CPU)
    assert rotation().flops((5,)) == 0
