"""Newton-Schulz of many matrices: the bits of one at a time, batched only where that is known to hold and to pay."""

from __future__ import annotations

import pytest
import torch

from impl.optimizers import newton_schulz
from impl.optimizers.base import create
from impl.optimizers.newton_schulz import BATCHED_SIDES, COEFFICIENT_SETS, batched, orthogonalize, orthogonalize_many

DTYPES = [torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(32, 32), (32, 96), (192, 32), (64, 32), (96, 96), (8, 32), (8, 8), (48, 80), (16, 16), (96, 288), (32, 1)]
SHAPES += [(7, 13), (13, 7), (5, 3), (1, 9), (1, 1), (33, 129), (40, 24), (9, 32), (100, 36), (128, 128), (256, 96)]
COEFFICIENTS = COEFFICIENT_SETS["simple"]


def matrices(shape, count, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=dtype) for _ in range(count)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_many_have_the_bits_of_one(shape, dtype):
    given = matrices(shape, 9)
    alone = [orthogonalize(m, COEFFICIENTS, 5, dtype) for m in given]
    for count in (1, 2, 3, 5, 8, 9):
        many = orthogonalize_many(given[:count], COEFFICIENTS, 5, dtype)
        assert all(torch.equal(a, b) for a, b in zip(many, alone, strict=False))
        assert all(m.is_contiguous() and m.dtype == dtype for m in many)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixed_shapes_in_any_order(dtype):
    given = [matrices(shape, 1, seed)[0] for seed, shape in enumerate(SHAPES * 2)]
    for many in (given, given[::-1], given[5:17]):
        for found, matrix in zip(orthogonalize_many(many, COEFFICIENTS, 5, dtype), many, strict=True):
            assert torch.equal(found, orthogonalize(matrix, COEFFICIENTS, 5, dtype))
    assert orthogonalize_many([], COEFFICIENTS, 5, dtype) == []


def test_where_matrices_lie_does_not_matter():
    """Views into a buffer at odd offsets, and transposed ones, are made contiguous first."""
    given = matrices((32, 96), 4)
    buffer = torch.empty(4 * 32 * 96 + 50)
    views = [buffer[i * 3083 + 1 :][: 32 * 96].view(32, 96) for i in range(4)]
    for view, matrix in zip(views, given, strict=True):
        view.copy_(matrix)
    turned = [m.T.contiguous().T for m in given]
    for dtype in DTYPES:
        expected = orthogonalize_many(given, COEFFICIENTS, 5, dtype)
        for others in (views, turned):
            many = orthogonalize_many(others, COEFFICIENTS, 5, dtype)
            assert all(torch.equal(a, b) for a, b in zip(many, expected, strict=True))


def products(monkeypatch, given, dtype):
    """The number of products of batches and of single matrices."""
    counts = {"baddbmm": 0, "addmm": 0}
    for name in counts:
        function = getattr(torch, name)

        def wrapped(*args, _name=name, _function=function, **kwargs):
            counts[_name] += 1
            return _function(*args, **kwargs)

        monkeypatch.setattr(newton_schulz.torch, name, wrapped)
    orthogonalize_many(given, COEFFICIENTS, 5, dtype)
    return counts["baddbmm"], counts["addmm"]


@pytest.mark.parametrize(
    ("shapes", "dtype", "expected"),
    [
        ([(32, 96)] * 8, torch.bfloat16, (10, 0)),
        ([(32, 96), (32, 64)] * 4, torch.float32, (20, 0)),
        ([(32, 96)], torch.bfloat16, (0, 10)),
        ([(BATCHED_SIDES.stop, 512)] * 2, torch.bfloat16, (0, 20)),
        ([(7, 13)] * 2, torch.float32, (0, 20)),
        ([(4, 64)] * 2, torch.float64, (0, 20)),
    ],
    ids=["equal", "two shapes", "one", "large", "not aligned", "too small"],
)
def test_what_is_batched(monkeypatch, shapes, dtype, expected):
    given = [matrices(shape, 1)[0] for shape in shapes]
    assert products(monkeypatch, given, dtype) == expected


def test_only_cpus_are_known_to_keep_the_bits():
    assert batched(torch.empty(32, 96), torch.bfloat16)
    assert not batched(torch.empty(32, 96, device="meta"), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_among_others_stays_zero(dtype):
    given = matrices((32, 96), 4)
    given[2] = torch.zeros(32, 96)
    many = orthogonalize_many(given, COEFFICIENTS, 5, dtype)
    assert not many[2].any()
    assert all(m.any() for i, m in enumerate(many) if i != 2)


def test_float64_is_float64_throughout():
    """A matrix that differs from another below fp32's precision has another result."""
    (matrix,) = matrices((6, 9), 1, dtype=torch.float64)
    other = matrix.clone()
    other[2, 3] += 1e-11
    change = orthogonalize(matrix, COEFFICIENTS, 5, torch.float64) - orthogonalize(
        other, COEFFICIENTS, 5, torch.float64
    )
    assert 1e-13 < change.norm() < 1e-9


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (32, 32)])
def test_health_of_muon(shape):
    muon, (grad,) = create("muon"), matrices(shape, 1)
    state = muon.init_state(shape, torch.device("cpu"))
    update = muon.update(grad, state, 1)
    x = update / (0.2 * max(shape) ** 0.5)
    gram = x.T @ x if shape[0] > shape[1] else x @ x.T
    found = muon.health(state, update)["orthogonality"]
    assert found == pytest.approx(float((gram - torch.eye(len(gram))).abs().max()), rel=1e-4)
    limit = muon.health_metrics["orthogonality"]
    assert found < 0.6
    assert 0.9 < muon.health(state, update * 0.1)["orthogonality"] < 1.0 < limit, "less than nothing is not possible"
    assert muon.health(state, update * 2)["orthogonality"] > limit
    assert muon.health(state, update * float("nan"))["orthogonality"] > limit
    assert muon.health(state, update * 0)["orthogonality"] == 0.0
