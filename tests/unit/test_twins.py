"""Every optimizer against its slow twin (twins.py), in float64 to rounding and in fp32, and against mathematics.

The first covariance of a matrix that is not square is rank-deficient, and the basis of its null space is arbitrary:
there the twin starts from a full-rank state given to both, or from the basis that the optimizer found, once that is
shown to be one.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from impl.optimizers import eigenbasis
from impl.optimizers.base import Optimizer, State, create, registry
from tests.unit.twins import NEWTON_SCHULZ, TWINS, RotationTwin, Twin

CPU = torch.device("cpu")
F64, F32 = torch.float64, torch.float32
EXACT = 1e-9
"""Relative error in float64."""
SINGLE = 5e-3
"""Relative error in fp32 after a dozen steps: a basis is as sensitive as its closest eigenvalues are near."""
SHAPES = [(6, 6), (5, 8), (8, 5), (1, 5), (5, 1), (12, 7)]
DEGENERATE_SAFE = {"eps": 1e-3}

ADAMS: list[dict[str, Any]] = [{}, {"betas": (0.8, 0.99), "eps": 1e-3}]
MUONS: list[dict[str, Any]] = [
    *({"coefficients": name, "ns_steps": steps} for name in NEWTON_SCHULZ for steps in (3, 10)),
    {"nesterov": False, "scale": "original"},
    {"momentum": 0.7, "scale": "spectral"},
    {"scale": "none"},
]
SOAPS: list[dict[str, Any]] = [
    {"period": 1},
    {"period": 3, "betas": (0.9, 0.99)},
    {"period": 2, "shampoo_beta": 0.8},
    {"period": 2, "max_side": 6},
]
ROTATIONS: list[dict[str, Any]] = [
    *(
        {"source": source, "geometry": geometry, "period": period, "nesterov": nesterov}
        for source in ("2nd", "1st")
        for geometry in ("bilateral", "unilateral")
        for period, nesterov in ((1, False), (3, True), (3, False))
    ),
    {"period": 3, "offset": 2, "gain": 1.5, "betas": (0.8, 0.95)},
    {"period": 2, "shampoo_beta": 0.7},
    {"period": 2, "max_side": 6},
    *({"period": 2, "max_side": 3, "beyond": "blocks", "source": source} for source in ("2nd", "1st")),
]
SHAMPOOS: list[dict[str, Any]] = [
    {"period": 1},
    {"period": 3, "momentum": 0.8, "shampoo_beta": 0.9},
    {"period": 2, "exponent": 0.5, "ridge": 1e-3},
    {"period": 2, "max_side": 6},
    *({"period": 2, "grafting": model} for model in ("sgd", "adam")),
    {"period": 2, "max_side": 4, "grafting": "adam", "graft_beta": 0.8, "graft_eps": 1e-3},
]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(("adamw", s) for s in ADAMS),
    *(("nadam", s) for s in [*ADAMS, {"momentum_decay": 0.3}]),
    *(("muon", {"ns_dtype": "float64", **s}) for s in MUONS),
    *(("soap", {**DEGENERATE_SAFE, **s}) for s in SOAPS),
    *(("basis-rotation", {**DEGENERATE_SAFE, **s}) for s in ROTATIONS),
    *(("shampoo", s) for s in SHAMPOOS),
]
NOTHING_ARBITRARY = ("adamw", "nadam", "muon", "shampoo")
"""No basis, or, in Shampoo, none that shows: the ridge makes a root of what has no rank."""


def identify(value: object) -> str | None:
    if isinstance(value, dict):
        return "-".join(f"{k}={v}" for k, v in value.items()) or "default"
    return None


def gradients(shape: tuple[int, ...], count: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Noise with a covariance of its own on both sides and another size at each step."""
    generator = torch.Generator().manual_seed(seed)
    m, n = shape
    left, right = (torch.randn(k, k, generator=generator, dtype=F64) + torch.eye(k, dtype=F64) for k in (m, n))
    noise = [torch.randn(m, n, generator=generator, dtype=F64) * (1 + i % 3) for i in range(count)]
    return [(left @ x @ right / (m * n) ** 0.5).to(dtype) for x in noise]


def full_rank(state: State, seed: int = 1) -> None:
    """Fill a fresh state as if steps had been done: nothing is zero, nothing has rank to lose."""
    generator = torch.Generator().manual_seed(seed)
    for key, tensor in state.items():
        noise = torch.randn(tensor.shape, generator=generator, dtype=F64)
        if key.startswith("basis."):
            noise = torch.linalg.qr(noise)[0]
        elif key.startswith(("factor.", "root.")):
            noise = noise @ noise.T / len(noise) + 0.1 * torch.eye(len(noise), dtype=F64)
        elif key.startswith("second"):
            noise = noise.square() + 0.1
        elif key == "refreshes":
            noise = torch.ones((), dtype=F64)
        elif tensor.ndim == 0:  # a count, or NAdam's product, that only steps may change
            continue
        tensor.copy_(noise)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def same_state(state: State, twin: Twin, tolerance: float) -> None:
    for key, expected in twin.state().items():
        assert state[key].shape == expected.shape, key
        if key.startswith("basis."):  # up to the signs of its columns
            overlap = (state[key].to(F64).T @ expected.to(F64)).abs()
            assert (overlap - torch.eye(len(overlap), dtype=F64)).abs().max() < tolerance, key
        else:
            assert distance(state[key], expected) < tolerance, key


def pair(name: str, settings: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Optimizer, Any, Any]:
    optimizer = create(name, settings)
    return optimizer, optimizer.init_state(shape, CPU, dtype), TWINS[name](optimizer.hyper, shape, dtype)


def is_eigenbasis(basis: Tensor, factor: Tensor) -> None:
    """Columns are orthonormal, diagonalise ``factor`` and come by falling eigenvalue."""
    torch.testing.assert_close(basis.T @ basis, torch.eye(len(basis), dtype=basis.dtype), rtol=0, atol=1e-12)
    values = torch.linalg.eigvalsh(factor).flip(0)
    torch.testing.assert_close(basis.T @ factor @ basis, values.diag(), rtol=0, atol=1e-12 * float(values[0]))


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=identify)
def test_equals_the_twin_from_the_first_step_in_float64(name: str, settings: dict[str, Any]) -> None:
    """Both on their own all the way.  A basis has signs that neither shares: the updates must not show them."""
    for shape in SHAPES if name in NOTHING_ARBITRARY else [(6, 6), (9, 9), (1, 1)]:
        optimizer, state, twin = pair(name, settings, shape, F64)
        for step, grad in enumerate(gradients(shape, 14, F64), 1):
            kept = grad.clone()
            update, expected = optimizer.update(grad, state, step), twin.update(kept)
            assert update.dtype == F64
            assert distance(update, expected) < EXACT, (shape, step)
            same_state(state, twin, EXACT)


def error_of_the_last_update(name: str, settings: dict[str, Any], others: dict[str, Any]) -> float:
    """Of the optimizer with ``settings`` against the twin with ``others``."""
    shape = (6, 6)
    (optimizer, state, _), (_, _, twin) = pair(name, settings, shape, F64), pair(name, others, shape, F64)
    for step, grad in enumerate(gradients(shape, 11, F64), 1):
        error = distance(optimizer.update(grad, state, step), twin.update(grad))
    return error


@pytest.mark.parametrize("name", ["soap", "basis-rotation", "shampoo"])
def test_the_twins_notice_another_period(name: str) -> None:
    assert error_of_the_last_update(name, {"period": 3}, {"period": 4}) > 1e-3


@pytest.mark.parametrize("name", ["soap", "basis-rotation"])
def test_the_twins_notice_a_second_moment_that_is_left_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigenbasis, "permute", lambda second, block, order: None)
    settings = {"period": 1, **DEGENERATE_SAFE}
    assert error_of_the_last_update(name, settings, settings) > 0.02


@pytest.mark.parametrize(("name", "settings"), VARIANTS, ids=identify)
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, EXACT), (F32, SINGLE)], ids=["float64", "float32"])
def test_equals_the_twin_from_a_full_rank_state(
    name: str, settings: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    before = 4
    for number, shape in enumerate(SHAPES):
        optimizer, state, twin = pair(name, settings, shape, dtype)
        if name == "nadam":  # its product of mu has no other way to its fourth value
            for step, grad in enumerate(gradients(shape, before, dtype, seed=90), 1):
                optimizer.update(grad, state, step)
        full_rank(state, seed=number)
        twin.load({key: tensor.clone() for key, tensor in state.items()}, before)
        for step, grad in enumerate(gradients(shape, 12, dtype, seed=number), before + 1):
            update, expected = optimizer.update(grad, state, step), twin.update(grad)
            assert update.dtype == dtype
            assert distance(update, expected) < tolerance, (shape, step)
        same_state(state, twin, 10 * tolerance)


@pytest.mark.parametrize("source", ["2nd", "1st"])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_rotation_from_a_basis_with_a_null_space(source: str, shape: tuple[int, int]) -> None:
    """The first basis is one of many: shown to be an eigenbasis, then given to the twin."""
    optimizer, state, twin = pair("basis-rotation", {"source": source, "period": 3, "eps": 1e-3}, shape, F64)
    first, *rest = gradients(shape, 10, F64)
    update, expected = optimizer.update(first, state, 1), twin.update(first)
    assert distance(update, expected) < EXACT, "what the first gradient does not see has no part in the first update"
    for side, x in (("left", first), ("right", first.T)):
        is_eigenbasis(state[f"basis.{side}.0"], x @ x.T)
    twin.load({key: tensor.clone() for key, tensor in state.items()}, 1)
    for step, grad in enumerate(rest, 2):
        assert distance(optimizer.update(grad, state, step), twin.update(grad)) < EXACT, step
    same_state(state, twin, EXACT)


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_soap_from_a_basis_with_a_null_space(shape: tuple[int, int]) -> None:
    optimizer, state, twin = pair("soap", {"period": 3, "eps": 1e-3}, shape, F64)
    first, *rest = gradients(shape, 10, F64)
    assert not optimizer.update(first, state, 1).any()
    for side, x in (("left", first), ("right", first.T)):
        is_eigenbasis(state[f"basis.{side}.0"], x @ x.T)
    twin.load({key: tensor.clone() for key, tensor in state.items()}, 1)
    for step, grad in enumerate(rest, 2):
        assert distance(optimizer.update(grad, state, step), twin.update(grad)) < EXACT, step
    same_state(state, twin, EXACT)


@pytest.mark.parametrize("name", TWINS)
def test_many_at_once_equal_the_twins(name: str) -> None:
    """Mixed shapes, equal ones among them, in one call: each matrix has the update of its own twin."""
    settings = {"muon": {"ns_dtype": "float64"}, "adamw": {}, "nadam": {}}.get(name, {"period": 2})
    optimizer = create(name, settings)
    shapes = [(6, 6), (8, 5), (16, 24), (6, 6), (5, 8), (8, 8), (16, 24), (8, 5), (8, 8), (6, 6)]  # 8s are batched
    states = [optimizer.init_state(shape, CPU, F64) for shape in shapes]
    twins = [TWINS[name](optimizer.hyper, shape, F64) for shape in shapes]
    for number, (state, twin) in enumerate(zip(states, twins, strict=True)):
        if name != "nadam":
            full_rank(state, number)
            twin.load({key: tensor.clone() for key, tensor in state.items()}, 3)
    streams = [gradients(shape, 5, F64, seed) for seed, shape in enumerate(shapes)]
    for step in range(5):
        grads = [stream[step] for stream in streams]
        updates = optimizer.update_many(grads, states, step + (1 if name == "nadam" else 4))
        for update, twin, grad in zip(updates, twins, grads, strict=True):
            assert distance(update, twin.update(grad)) < EXACT


@pytest.mark.parametrize("index", [0, 1, 2, 5])
def test_a_matrix_refreshes_in_its_turn(index: int) -> None:
    """With ``stagger`` matrix j refreshes at steps j modulo the period, besides the first."""
    settings = {"period": 3, "stagger": True, "eps": 1e-3}
    optimizer, state, _ = pair("basis-rotation", settings, (6, 6), F64)
    optimizer.place(state, index)
    twins = {offset: RotationTwin(optimizer.hyper, (6, 6), F64, offset=offset) for offset in range(3)}
    errors = dict.fromkeys(twins, 0.0)
    for step, grad in enumerate(gradients((6, 6), 9, F64), 1):
        update = optimizer.update(grad, state, step)
        for offset, twin in twins.items():
            errors[offset] = max(errors[offset], distance(update, twin.update(grad)))
    right = -index % 3
    assert errors.pop(right) < EXACT
    assert min(errors.values()) > 1e-3, "negative control: another turn is noticed"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 5e-3), ("bfloat16", 4e-2)])
def test_half_precision_bases_equal_a_twin_that_stores_them_so(dtype: str, tolerance: float) -> None:
    settings = {"period": 3, "eps": 1e-3, "basis_dtype": dtype}
    optimizer, state, twin = pair("basis-rotation", settings, (7, 7), F32)
    full_rank(state)
    twin.load({key: tensor.clone() for key, tensor in state.items()}, 3)
    for step, grad in enumerate(gradients((7, 7), 9, F32), 4):
        assert distance(optimizer.update(grad, state, step), twin.update(grad)) < tolerance


@pytest.mark.parametrize("exponent", [0.25, 0.5])
@pytest.mark.parametrize("shape", [(6, 6), (5, 8), (8, 5), (1, 5), (12, 7)])
def test_shampoo_with_the_coupled_newton_iteration(shape: tuple[int, int], exponent: float) -> None:
    """The twin takes eigendecompositions; the iteration's largest eigenvalue, for the ridge, is an estimate."""
    settings = {"root": "coupled-newton", "exponent": exponent, "period": 2, "ridge": 1e-4}
    optimizer, state, twin = pair("shampoo", settings, shape, F64)
    for step, grad in enumerate(gradients(shape, 9, F64), 1):
        assert distance(optimizer.update(grad, state, step), twin.update(grad)) < 1e-6, step


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.04)])
@pytest.mark.parametrize("shape", SHAPES)
def test_muon_in_the_precision_of_the_iteration(shape: tuple[int, int], dtype: str, tolerance: float) -> None:
    """Against the twin's in float64.  Singular values are within a factor of three: tiny ones grow by up to 3.4^5, and
    bf16's rounding with them."""
    optimizer, state, _ = pair("muon", {"ns_dtype": dtype}, shape, F32)
    twin = TWINS["muon"](create("muon", {"ns_dtype": "float64"}).hyper, shape, F64)
    u, v = orthogonal(shape[0], 1)[:, : min(shape)], orthogonal(shape[1], 2)[:, : min(shape)]
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 6):
        grad = u * (1 + 2 * torch.rand(min(shape), generator=generator, dtype=F64)) @ v.T
        assert distance(optimizer.update(grad.to(F32), state, step), twin.update(grad)) < tolerance


MATRIX_LIKE = ["muon", "soap", "basis-rotation", "shampoo"]
PLAIN: dict[str, dict[str, Any]] = {
    "muon": {"ns_dtype": "float64"},
    "soap": {"period": 2, "eps": 1e-3},
    "basis-rotation": {"period": 2, "eps": 1e-3},
    "shampoo": {"period": 2},
}


def run(name: str, grads: list[Tensor], **settings: Any) -> list[Tensor]:
    optimizer = create(name, {**PLAIN.get(name, {}), **settings})
    state = optimizer.init_state(tuple(grads[0].shape), CPU, grads[0].dtype)
    return [optimizer.update(grad, state, step) for step, grad in enumerate(grads, 1)]


def signed_permutation(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator).to(F64) * 2 - 1
    return torch.eye(size, dtype=F64)[torch.randperm(size, generator=generator)] * signs


def orthogonal(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=F64))[0]


def largest_error(got: list[Tensor], expected: list[Tensor]) -> float:
    return max(distance(a, b) for a, b in zip(got, expected, strict=True) if b.any())


@pytest.mark.parametrize("name", registry())
def test_order_and_signs_of_rows_and_columns_do_not_matter(name: str) -> None:
    """The update of ``P G Q`` is ``P update(G) Q`` for signed permutations: no row or column is treated specially."""
    grads = gradients((7, 7), 9, F64)
    p, q = signed_permutation(7, 1), signed_permutation(7, 2)
    expected = [p @ update @ q for update in run(name, grads)]
    assert largest_error(run(name, [p @ grad @ q for grad in grads]), expected) < EXACT


@pytest.mark.parametrize("name", MATRIX_LIKE)
def test_turned_gradients_give_turned_updates(name: str) -> None:
    """The same for any orthogonal matrices: what Adam, which sees coordinates, cannot do."""
    grads = gradients((7, 7), 9, F64)
    u, v = orthogonal(7, 1), orthogonal(7, 2)
    turned = [u @ grad @ v for grad in grads]
    assert largest_error(run(name, turned), [u @ update @ v for update in run(name, grads)]) < EXACT
    adam = [u @ update @ v for update in run("adamw", grads)]
    assert largest_error(run("adamw", turned), adam) > 0.1, "negative control"


@pytest.mark.parametrize("name", [*MATRIX_LIKE, "adamw", "nadam"])
def test_the_transposed_gradient_has_the_transposed_update(name: str) -> None:
    """Both sides are treated alike (scales of Muon that tell rows from columns aside)."""
    grads = gradients((7, 7), 9, F64)
    transposed = run(name, [grad.T.contiguous() for grad in grads])
    assert largest_error(transposed, [update.T for update in run(name, grads)]) < EXACT


@pytest.mark.parametrize("name", ["soap", "basis-rotation"])
@pytest.mark.parametrize("refresh", [False, True])
def test_signs_and_order_of_a_basis_do_not_matter(name: str, refresh: bool) -> None:
    """Columns in another order, the second moment with them, and other signs: the same update, now and later."""
    settings = {**PLAIN[name], "period": 3}
    optimizer, state, _ = pair(name, settings, (6, 9), F64)
    full_rank(state)
    changed = {key: tensor.clone() for key, tensor in state.items()}
    u, v = signed_permutation(6, 3), signed_permutation(9, 4)
    changed["basis.left.0"], changed["basis.right.0"] = changed["basis.left.0"] @ u, changed["basis.right.0"] @ v
    changed["second"] = u.abs().T @ changed["second"] @ v.abs()
    for step, grad in enumerate(gradients((6, 9), 6, F64), 3 if refresh else 4):
        update = optimizer.update(grad, state, step)
        assert distance(optimizer.update(grad, changed, step), update) < EXACT


@pytest.mark.parametrize("name", registry())
@pytest.mark.parametrize("dtype", [F64, F32], ids=["float64", "float32"])
@pytest.mark.parametrize("shape", [(6, 6), (5, 8)])
def test_zero_gradients_give_exactly_zero(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    zeros = [torch.zeros(shape, dtype=dtype)] * 4
    for settings in ({}, {"period": 1}) if "period" in create(name).hyper.__class__.model_fields else ({},):
        for update in run(name, zeros, **settings):
            assert torch.equal(update, torch.zeros(shape, dtype=dtype))


@pytest.mark.parametrize("name", TWINS)
def test_a_gradient_that_vanishes_is_a_step_like_any_other(name: str) -> None:
    """The momentum goes on, and its decay is the twin's."""
    optimizer, state, twin = pair(name, PLAIN.get(name, {}), (6, 6), F64)
    grads = gradients((6, 6), 9, F64)
    for i in (3, 4, 7):
        grads[i] = torch.zeros(6, 6, dtype=F64)
    for step, grad in enumerate(grads, 1):
        assert distance(optimizer.update(grad, state, step), twin.update(grad)) < EXACT


def adam_of_a_number(values: list[float], beta1: float, beta2: float, eps: float, start: int) -> list[float]:
    """Updates of one number, eps added to the uncorrected root; gradients before ``start`` are not seen."""
    m = v = 0.0
    out = []
    for step, g in enumerate(values):
        if step < start:
            out.append(0.0)
            continue
        t = step - start + 1
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        out.append(m / (math.sqrt(v) + eps) * math.sqrt(1 - beta2**t) / (1 - beta1**t))
    return out


def muon_of_a_number(values: list[float]) -> list[float]:
    """A momentum of rank one has one singular value, which the norm makes 1: only its sign is left."""
    m, out = 0.0, []
    for g in values:
        m = 0.95 * m + 0.05 * g
        s = math.copysign(1.0, 0.95 * m + 0.05 * g)
        for _ in range(5):
            a, b, c = NEWTON_SCHULZ["simple"][0]
            s = a * s + b * s**3 + c * s**5
        out.append(s)
    return out


def shampoo_of_a_number(values: list[float], period: int = 10) -> list[float]:
    """Both statistics are the averaged square; two roots with exponents of a quarter divide by its root."""
    beta, shampoo_beta, ridge = 0.9, 0.95, 1e-6
    m = a = kept = 0.0
    out = []
    for t, g in enumerate(values, 1):
        m, a = beta * m + (1 - beta) * g, shampoo_beta * a + (1 - shampoo_beta) * g * g
        if t == 1 or t % period == 0:
            kept = a / (1 - shampoo_beta**t) * (1 + ridge)
        out.append(m / (1 - beta**t) / math.sqrt(kept))
    return out


RANK_ONE: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (muon_of_a_number, {"ns_dtype": "float64", "scale": "none"}),
    "soap": (functools.partial(adam_of_a_number, beta1=0.95, beta2=0.95, eps=1e-3, start=1), {"eps": 1e-3}),
    "basis-rotation": (functools.partial(adam_of_a_number, beta1=0.9, beta2=0.999, eps=1e-3, start=0), {"eps": 1e-3}),
    "shampoo": (shampoo_of_a_number, {"momentum": 0.9, "shampoo_beta": 0.95, "ridge": 1e-6}),
}


@pytest.mark.parametrize("name", RANK_ONE)
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5)])
@pytest.mark.parametrize("period", [1, 3])
def test_gradients_of_rank_one_are_a_number(name: str, shape: tuple[int, int], period: int) -> None:
    """``c_t x y^T`` with fixed unit vectors: the update is ``x y^T`` times the update of the number ``c_t``.

    No basis of the null space may show.
    """
    rule, settings = RANK_ONE[name]
    settings = settings if name == "muon" else {**settings, "period": period}
    if name == "shampoo":
        rule = functools.partial(rule, period=period)
    generator = torch.Generator().manual_seed(8)
    x, y = (torch.nn.functional.normalize(torch.randn(k, generator=generator, dtype=F64), dim=0) for k in shape)
    numbers = [2.0, -0.5, 1.5, 0.3, -1.0, 0.0, 0.7, 1.1]
    direction = torch.outer(x, y)
    for got, expected in zip(run(name, [c * direction for c in numbers], **settings), rule(numbers), strict=True):
        torch.testing.assert_close(got, expected * direction, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["soap", "basis-rotation"])
def test_rounding_of_rank_one_gradients_is_not_blown_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 and with the default eps, below the rounding that projections leave where a gradient has no part."""
    generator = torch.Generator().manual_seed(8)
    x, y = (torch.nn.functional.normalize(torch.randn(k, generator=generator, dtype=F64), dim=0) for k in (20, 30))
    numbers, direction = [2.0, -0.5, 1.5, 0.3, -1.0, 0.4, 0.7, 1.1], torch.outer(x, y)
    expected = [e * direction for e in functools.partial(RANK_ONE[name][0], eps=1e-8)(numbers)]

    def error() -> float:
        return largest_error(run(name, [(c * direction).to(F32) for c in numbers], eps=1e-8), expected)

    assert error() < 1e-4
    monkeypatch.setattr(eigenbasis, "drop_rounding", lambda projections: None)
    assert error() > 0.5, "negative control"


def test_the_twins_cover_the_optimizers_of_the_papers() -> None:
    """One that somebody adds needs no twin here to be used; those that tables compare have one."""
    assert set(TWINS) >= {"adamw", "nadam", "muon", "soap", "basis-rotation", "shampoo"}
    assert set(TWINS) <= set(registry())
    assert {name for name, _ in VARIANTS} == set(TWINS)
