"""Which matrices may be computed as one batch without a change in their bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from impl.optimizers.base import State

ALIGNMENT = 64
"""Bytes to which PyTorch aligns an allocation on a CPU."""


def keeps_bits(itemsize: int, *elements: int) -> bool:
    """Return whether what is a multiple of each of ``elements`` long begins in a batch where it would alone.

    A product of fp32 or fp64 matrices may differ in the last bit if a factor begins elsewhere in a cache line, so each
    must begin at a multiple of :data:`ALIGNMENT` bytes.  That is all it takes on a CPU; a GPU library may choose
    another kernel for another number of matrices.
    """
    return all(count * itemsize % ALIGNMENT == 0 for count in elements)


def key(index: int, grad: Tensor, sides: Sequence[int]) -> tuple[Hashable, ...]:
    """Return what ``grad`` has in common with those in its batch: the shape, unless a batch would change its bits.

    index: its own number.  sides: lengths of the rows of everything that takes part in its products.
    """
    shape = tuple(grad.shape)
    return (shape,) if keeps_bits(grad.itemsize, *sides) else (shape, index)


def in_batches(
    advance: Callable[[Tensor, list[State]], Tensor],
    keys: Sequence[Hashable],
    grads: Sequence[Tensor],
    states: Sequence[State],
) -> list[Tensor]:
    """Return the updates of ``grads``, those of equal keys computed at once by ``advance([b, m, n], their states)``."""
    out = [torch.empty(0)] * len(grads)
    for members in group(keys):
        updates = advance(torch.stack([grads[i] for i in members]), [states[i] for i in members])
        for index, update in zip(members, updates, strict=True):
            out[index] = update
    return out


def group(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of equal keys, groups and their members in order."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        found[key].append(index)
    return list(found.values())
