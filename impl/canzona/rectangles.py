"""Where a rank's elements lie in the whole tensors: flat ranges of tensor-parallel shards as rectangles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from impl.models.parameters import ParamSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rectangle:
    """Elements of a whole tensor.

    offsets: of its first element in the whole tensor.
    tensor: where this rank keeps them, usually a view; its shape is the rectangle's.
    """

    offsets: Shape
    tensor: Tensor


def rectangles(flat: Tensor, low: int, spec: ParamSpec, tp: int, tp_rank: int, shape: Shape) -> list[Rectangle]:
    """Return ``flat`` as views that are rectangles of a whole tensor, without empty ones.

    flat: the elements from ``low`` on of this rank's flattened shard of ``spec``.
    shape: of the whole tensor that the offsets count in.  It has the rows of ``spec`` from row ``spec.first`` on, and
        may end before the vocabulary padding does: padding is left out.
    """
    local, found = spec.local_shape(tp), []
    for offsets, sizes, start in _boxes(local, low, low + flat.numel()):
        view = flat[start - low : start - low + math.prod(sizes)].view(sizes)
        for piece in _unsharded(Rectangle(offsets, view), spec, tp, tp_rank):
            shifted = (piece.offsets[0] + spec.first, *piece.offsets[1:]) if piece.offsets else ()
            clipped = _clipped(Rectangle(shifted, piece.tensor), shape)
            if clipped.tensor.numel():
                found.append(clipped)
    return found


def _boxes(shape: Shape, low: int, high: int) -> Iterator[tuple[Shape, Shape, int]]:
    """Yield offsets, sizes and flat start of the contiguous boxes that elements ``low .. high`` of ``shape`` make.

    In a matrix these are the rest of a row, whole rows, and the beginning of a row.
    """
    if low >= high:
        return
    if len(shape) < 2:
        yield ((low,), (high - low,), low) if shape else ((), (), 0)
        return
    size = math.prod(shape[1:])
    first, last = -(-low // size), high // size  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, low, high)
        return
    yield from _in_row(shape, first - 1, low, first * size)
    if first < last:
        zeros = (0,) * (len(shape) - 1)
        yield (first, *zeros), (last - first, *shape[1:]), first * size
    yield from _in_row(shape, last, last * size, high)


def _in_row(shape: Shape, row: int, low: int, high: int) -> Iterator[tuple[Shape, Shape, int]]:
    start = row * math.prod(shape[1:])
    for offsets, sizes, at in _boxes(shape[1:], low - start, high - start):
        yield (row, *offsets), (1, *sizes), at + start


def _unsharded(local: Rectangle, spec: ParamSpec, tp: int, tp_rank: int) -> Iterator[Rectangle]:
    """Yield the parts of a rectangle of this rank's shard with their offsets in the whole parameter."""
    dim = spec.tp_dim
    if dim is None or tp == 1:
        yield local
        return
    low, high = local.offsets[dim], local.offsets[dim] + local.tensor.shape[dim]
    start = 0  # of the block in the whole tensor
    for block in spec.sharded_blocks:
        size = block // tp
        here = start // tp  # of the block in the shard
        a, b = max(low, here), min(high, here + size)
        if a < b:
            offsets = list(local.offsets)
            offsets[dim] = start + tp_rank * size + a - here
            yield Rectangle(tuple(offsets), local.tensor.narrow(dim, a - low, b - a))
        start += block


def _clipped(piece: Rectangle, shape: Shape) -> Rectangle:
    view = piece.tensor
    for dim, (offset, size) in enumerate(zip(piece.offsets, shape, strict=True)):
        view = view.narrow(dim, 0, max(0, min(view.shape[dim], size - offset)))
    return Rectangle(piece.offsets, view)
