"""Which matrices may be computed as one batch without a change in their bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

ALIGNMENT = 64
"""Bytes to which PyTorch aligns an allocation on a CPU."""


def keeps_bits(itemsize: int, *elements: int) -> bool:
    """Return whether what is a multiple of each of ``elements`` long begins in a batch where it would alone.

    A product of fp32 or fp64 matrices may differ in the last bit if a factor begins elsewhere in a cache line, so each
    must begin at a multiple of :data:`ALIGNMENT` bytes.  That is all it takes on a CPU; a GPU library may choose
    another kernel for another number of matrices.
    """
    return all(count * itemsize % ALIGNMENT == 0 for count in elements)


def group(keys: Sequence[Hashable]) -> list[list[int]]:
    """Return the indices of equal keys, groups and their members in order."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        found[key].append(index)
    return list(found.values())
