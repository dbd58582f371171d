"""Rectangles of flat ranges against the elements themselves: every one once, at its place in the whole tensor."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch

from impl.canzona import rectangles as module
from impl.canzona.rectangles import Rectangle, rectangles
from impl.models.parameters import ParamSpec
from impl.models.sharding import shard

SPECS = [
    ParamSpec("plain", (7, 5)),
    ParamSpec("rows", (12, 5), tp_dim=0),
    ParamSpec("columns", (5, 12), tp_dim=1),
    ParamSpec("gate_up", (24, 3), tp_dim=0, blocks=(12, 12)),
    ParamSpec("uneven blocks", (36, 3), tp_dim=0, blocks=(6, 12, 18)),
    ParamSpec("column blocks", (5, 18), tp_dim=1, blocks=(6, 12)),
    ParamSpec("vector", (11,)),
    ParamSpec("cut vector", (12,), tp_dim=0),
    ParamSpec("one", (1,)),
    ParamSpec("scalar", ()),
    ParamSpec("three dimensions", (4, 6, 5), tp_dim=1),
    ParamSpec("thin", (6, 1), tp_dim=0),
    ParamSpec("wide", (1, 12), tp_dim=1),
]


def pieces(spec: ParamSpec, tp: int, cuts: Callable[[int], Sequence[int]], whole: torch.Tensor) -> list[Rectangle]:
    found = []
    for rank in range(tp):
        flat = shard(whole, spec, tp, rank).reshape(-1)
        for low, high in pairwise(cuts(len(flat))):
            found += rectangles(flat[low:high], low, spec, tp, rank, spec.shape)
    return found


def put_together(spec: ParamSpec, found: Sequence[Rectangle]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the whole tensor and how often each of its elements was there."""
    whole, seen = torch.full(spec.shape, -1.0), torch.zeros(spec.shape)
    for piece in found:
        place = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
        whole[place] = piece.tensor
        seen[place] += 1
    return whole, seen


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.name)
@pytest.mark.parametrize("tp", [1, 2, 3])
def test_every_element_once_and_at_its_place(spec: ParamSpec, tp: int) -> None:
    whole, rng = torch.arange(float(spec.numel)).view(spec.shape), random.Random(tp)

    def cuts(n: int) -> list[int]:
        return [0, *sorted(rng.randint(0, n) for _ in range(rng.randint(0, 4))), n]  # also empty ranges

    for _ in range(30):
        found = pieces(spec, tp, cuts, whole)
        got, seen = put_together(spec, found)
        assert torch.equal(got, whole)
        assert bool((seen == (tp if spec.tp_dim is None else 1)).all())  # every TP rank holds what is not cut
        assert all(piece.tensor.numel() for piece in found)


def test_a_range_of_a_matrix_is_at_most_three_rectangles_of_its_own_memory() -> None:
    flat = torch.arange(24.0)
    found = rectangles(flat[:17], 5, ParamSpec("m", (8, 4)), 1, 0, (8, 4))  # elements 5 .. 22
    assert [(p.offsets, tuple(p.tensor.shape)) for p in found] == [((1, 1), (1, 3)), ((2, 0), (3, 4)), ((5, 0), (1, 2))]
    for piece in found:
        piece.tensor.fill_(-1.0)
    assert bool((flat[:17] == -1.0).all())
    assert bool((flat[17:] != -1.0).all())


def test_padding_is_left_out_and_blocks_of_a_plan_lie_in_their_module() -> None:
    table = ParamSpec("embedding", (8, 2), tp_dim=0)  # 5 rows and 3 of padding
    flat = torch.zeros(8)
    assert [(p.offsets, tuple(p.tensor.shape)) for p in rectangles(flat, 0, table, 2, 0, (5, 2))] == [((0, 0), (4, 2))]
    assert [(p.offsets, tuple(p.tensor.shape)) for p in rectangles(flat, 0, table, 2, 1, (5, 2))] == [((4, 0), (1, 2))]
    assert rectangles(flat[:2], 6, table, 2, 1, (5, 2)) == []
    up = ParamSpec("fc1/up", (6, 2), tp_dim=0, part_of="fc1", first=6)
    (piece,) = rectangles(torch.zeros(6), 0, up, 2, 1, (12, 2))
    assert piece.offsets == (9, 0)


def test_a_wrong_offset_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: gate and up taken for one block."""
    spec = next(s for s in SPECS if s.name == "gate_up")
    whole = torch.arange(float(spec.numel)).view(spec.shape)
    right = module._unsharded

    def wrong(local, spec, tp, tp_rank):
        return right(local, ParamSpec(spec.name, spec.shape, spec.tp_dim), tp, tp_rank)

    monkeypatch.setattr(module, "_unsharded", wrong)
    got, seen = put_together(spec, pieces(spec, 2, lambda n: (0, 10, n), whole))
    assert bool((seen == 1).all())
    assert not torch.equal(got, whole)
