"""Cutting whole tensors into tensor-parallel shards and putting them together again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from impl.models.parameters import ParamSpec


def shard(whole: Tensor, spec: ParamSpec, tp: int, rank: int) -> Tensor:
    """Return the contiguous shard of ``whole`` that tensor-parallel rank ``rank`` of ``tp`` holds.

    Inverse of :func:`unshard`; every block of ``spec`` is cut on its own.
    """
    if tp == 1 or spec.tp_dim is None:
        return whole.contiguous()
    blocks = whole.split(list(spec.sharded_blocks), dim=spec.tp_dim)
    parts = [b.chunk(tp, dim=spec.tp_dim)[rank] for b in blocks]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=spec.tp_dim)).contiguous()


def unshard(shards: Sequence[Tensor], spec: ParamSpec) -> Tensor:
    """Return the whole contiguous tensor of the shards of all tensor-parallel ranks, in rank order.

    The result does not depend on the number of shards: blocks are put back in their own order, so an optimizer
    sees the same matrix under every tensor-parallel degree.
    """
    tp = len(shards)
    if tp == 1 or spec.tp_dim is None:
        return shards[0].contiguous()
    sizes = [b // tp for b in spec.sharded_blocks]
    pieces = [s.split(sizes, dim=spec.tp_dim) for s in shards]
    return torch.cat([p[b] for b in range(len(sizes)) for p in pieces], dim=spec.tp_dim).contiguous()


def split(whole: Tensor, spec: ParamSpec) -> list[Tensor]:
    """Return the logical matrices of the whole tensor of ``spec``, contiguous; inverse of :func:`join`."""
    if not spec.fragments:
        return [whole]
    pieces = [[whole[start:stop] for start, stop in fragment.rows] for fragment in spec.fragments]
    return [(rows[0] if len(rows) == 1 else torch.cat(rows)).contiguous() for rows in pieces]


def join(matrices: Sequence[Tensor], spec: ParamSpec) -> Tensor:
    """Return the whole tensor of ``spec``, made of its logical matrices."""
    if not spec.fragments:
        return matrices[0]
    whole = matrices[0].new_empty(spec.shape)
    for fragment, matrix in zip(spec.fragments, matrices, strict=True):
        at = 0
        for start, stop in fragment.rows:
            whole[start:stop] = matrix[at : at + stop - start]
            at += stop - start
    return whole
