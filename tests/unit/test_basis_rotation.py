"""Basis rotation against a float64 twin, its invariances, its schedule, and gradients and solvers that misbehave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from impl.optimizers import eigenbasis
from impl.optimizers.base import create
from impl.optimizers.soap import Soap, SoapHyper

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


class Twin:
    """Section by section from the formulas, in float64, one matrix, with explicit products ``M M^T``."""

    def __init__(self, source, geometry, period, betas, eps, nesterov=False):
        self.source, self.geometry, self.period = source, geometry, period
        self.betas, self.eps, self.nesterov = betas, eps, nesterov
        self.t, self.bases = 0, {}

    def update(self, grad, first_bases=None):
        """``first_bases``: to start from, as eigenvectors of equal eigenvalues are not unique; checked to be some."""
        g, (b1, b2) = grad.double(), self.betas
        m, n = g.shape
        if self.t == 0:
            self.momentum, self.second = torch.zeros_like(g), torch.zeros_like(g)
            self.average = {"left": torch.zeros(m, m).double(), "right": torch.zeros(n, n).double()}
        self.t += 1
        self.momentum = b1 * self.momentum + (1 - b1) * g
        self.average["left"] = b2 * self.average["left"] + (1 - b2) * g @ g.T
        self.average["right"] = b2 * self.average["right"] + (1 - b2) * g.T @ g
        sides = ("left", "right") if self.geometry == "bilateral" else ("left",) if m < n else ("right",)
        for side in sides:
            if self.t == 1 or self.t % self.period == 0:
                self.refresh(side, first_bases)
        u = self.bases.get("left", torch.eye(m).double())
        v = self.bases.get("right", torch.eye(n).double())
        self.second = b2 * self.second + (1 - b2) * (u.T @ g @ v) ** 2
        step, weights = self.momentum, 1 - b1**self.t
        if self.nesterov:
            step, weights = b1 * self.momentum + (1 - b1) * g, 1 - b1 ** (self.t + 1)
        direction = (u.T @ step @ v) / (self.second.sqrt() + self.eps)
        return u @ direction @ v.T * (1 - b2**self.t) ** 0.5 / weights

    def refresh(self, side, first_bases):
        x = self.momentum if side == "left" else self.momentum.T
        a = self.average[side] if self.source == "2nd" else x @ x.T
        if side not in self.bases:
            self.bases[side] = q = first_bases[f"basis.{side}.0"].double()
            torch.testing.assert_close(q.T @ q, torch.eye(len(a)).double(), rtol=0, atol=1e-5)
            eigenvalues = torch.linalg.eigvalsh(a).flip(0).diag()
            torch.testing.assert_close(q.T @ a @ q, eigenvalues, rtol=1e-3, atol=1e-5 * float(a.trace()))
            return
        q = self.bases[side]
        order = torch.argsort((q.T @ a @ q).diag(), descending=True)
        self.second = self.second[order] if side == "left" else self.second[:, order]
        if self.source == "1st":
            a = a + eigenbasis.RIDGE * a.trace() / len(a) * torch.eye(len(a)).double()
        self.bases[side] = torch.linalg.qr(a @ q[:, order])[0]


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (6, 6)])
@pytest.mark.parametrize(("source", "geometry"), VARIANTS)
def test_equals_the_twin(source, geometry, shape, period, nesterov):
    # eps keeps directions without any gradient yet, where fp32 has only rounding, from counting
    common = {"betas": (0.8, 0.95), "eps": 1e-3, "nesterov": nesterov}
    optimizer, state = rotation(source=source, geometry=geometry, period=period, **common), None
    twin = Twin(source, geometry, period, **common)
    other = Twin(source, geometry, period, (0.8, 0.95), 1e-3, not nesterov)
    for step, grad in enumerate(gradients(shape, 12), 1):
        (update,), state = run(optimizer, [grad], state, step)
        expected, wrong = twin.update(grad, bases(state)), other.update(grad, bases(state))
        assert (update - expected).norm() < 2e-3 * expected.norm()
    assert (update - wrong).norm() > 0.05 * wrong.norm(), "negative control"


def test_the_twin_notices_an_order_that_leaves_the_second_moment_behind(monkeypatch):
    monkeypatch.setattr(eigenbasis, "permute", lambda second, block, order: None)
    twin = Twin("2nd", "bilateral", 1, (0.8, 0.95), 1e-3)
    grads = gradients((6, 6), 6)
    optimizer = rotation(period=1, betas=(0.8, 0.95), eps=1e-3)
    first = bases(run(optimizer, grads[:1])[1])
    updates, _ = run(optimizer, grads)
    expected = [twin.update(grad, first) for grad in grads]
    assert max(float((u - e).norm() / e.norm()) for u, e in zip(updates, expected, strict=True)) > 0.05


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


@pytest.mark.parametrize(("source", "geometry"), VARIANTS)
@pytest.mark.parametrize("kind", ["zero", "rank-1", "zero column", "tiny", "huge"])
def test_degenerate_gradients(source, geometry, kind):
    grads = gradients((6, 5), 6)
    if kind == "zero":
        grads = [g * 0 for g in grads]
    elif kind == "rank-1":
        grads = [torch.outer(g[:, 0], g[0]) for g in grads]
    elif kind == "zero column":
        for g in grads:
            g[:, 2] = 0
    else:
        grads = [g * (1e-30 if kind == "tiny" else 1e15) for g in grads]
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


def failing(function, fails):
    def wrapped(x, *args, **kwargs):
        if fails(x):
            raise torch.linalg.LinAlgError("did not converge")
        return function(x, *args, **kwargs)

    return wrapped


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
    grads = gradients((6, 6), 3)
    optimizer = rotation(period=1)
    expected = [run(optimizer, [grad])[0][0] for grad in grads]
    poison = grads[1] @ grads[1].T * (1 - 0.999)

    def fails(x):
        return any((matrix.float() - poison).norm() < 1e-5 * poison.norm() for matrix in x)

    monkeypatch.setattr(torch.linalg, "eigh", failing(torch.linalg.eigh, fails))
    states = [optimizer.init_state((6, 6), CPU) for _ in grads]
    updates = optimizer.update_many(grads, states, 1)
    assert [int(state["failures"]) for state in states] == [0, 1, 0]
    assert torch.equal(updates[0], expected[0])
    assert torch.equal(updates[2], expected[2])


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
    """With only row blocks a tall matrix is a stack of independent ones."""
    grads = gradients((8, 4), 6)
    common = {"geometry": "unilateral", "period": 2}
    whole, _ = run(rotation(**common, max_side=4, beyond="blocks"), [g.T.contiguous() for g in grads])
    assert whole[0].shape == (4, 8)  # unilateral: the shorter side fits, so there is one block
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


def test_directions_without_momentum_stay(monkeypatch):
    """The 1st source: columns that span what the momentum lacks stay, but for their order, between refreshes."""
    flat = [torch.outer(torch.arange(1.0, 10.0), torch.tensor([1.0, -2.0, 3.0, 1.0]))] * 6

    def least_overlap():
        optimizer = rotation(source="1st", period=1)
        _, state = run(optimizer, flat[:5])
        before = bases(clone(state))["basis.left.0"]
        optimizer.update(flat[5], state, 6)
        return float((before.T @ bases(state)["basis.left.0"]).abs().amax(0).min())

    assert least_overlap() > 0.99
    monkeypatch.setattr(eigenbasis, "RIDGE", 0.0)
    assert least_overlap() < 0.9, "negative control"


@pytest.mark.parametrize(("shape", "rows"), [((50, 7), 10), ((50, 7), 50), ((53, 7), 8), ((2, 40, 5), 9), ((7, 7), 4)])
def test_tsqr_is_qr_up_to_signs(shape, rows):
    tall = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    q, r = eigenbasis.tsqr(tall, rows)
    expected = torch.linalg.qr(tall.double())
    torch.testing.assert_close(q @ r, tall, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(q.mT @ q, torch.eye(shape[-1]).expand(*shape[:-2], -1, -1), rtol=0, atol=3e-6)
    assert torch.equal(r, r.triu())
    torch.testing.assert_close(q.abs().double(), expected.Q.abs(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(r.abs().double(), expected.R.abs(), rtol=1e-4, atol=1e-5)


def test_tsqr_refuses_a_wide_matrix():
    with pytest.raises(ValueError, match="at least as many rows"):
        eigenbasis.tsqr(torch.zeros(3, 4), 2)


def test_a_wide_matrix_has_all_left_singular_vectors(monkeypatch):
    monkeypatch.setattr(eigenbasis, "TSQR_ROWS", 12)
    wide = torch.randn(2, 5, 60, generator=torch.Generator().manual_seed(4))
    u = eigenbasis.left_singular_vectors(wide)
    diagonal = u.mT @ (wide @ wide.mT) @ u
    torch.testing.assert_close(diagonal, torch.diag_embed(torch.linalg.svdvals(wide) ** 2), rtol=1e-3, atol=1e-3)


def test_flops_and_bytes_by_hand():
    shape, m, n = (6, 4), 6, 4
    projections = 6 * (m * m * n + m * n * n)
    qr = 8 / 3 * (m**3 + n**3)
    covariances, products = 2 * (m * m * n + m * n * n), m**3 + n**3
    second, first = rotation(period=5), rotation(period=5, source="1st")
    assert second.flops(shape) == pytest.approx(12 * m * n + projections + covariances + (2 * products + qr) / 5)
    assert second.published_flops(shape) == pytest.approx(second.flops(shape) + 4 * products / 5)
    assert first.flops(shape) == pytest.approx(12 * m * n + projections + (2 * covariances + qr) / 5)
    assert second.state_bytes(shape) == 8 * m * n + 8 * (m * m + n * n) + 16
    assert first.state_bytes(shape) == 8 * m * n + 4 * (m * m + n * n) + 16
    assert rotation(geometry="unilateral").state_bytes(shape) == 8 * m * n + 8 * n * n + 16


def test_only_matrices():
    with pytest.raises(ValueError, match="basis-rotation updates matrices"):
        rotation().init_state((5,), CPU)
    assert rotation().flops((5,)) == 0
