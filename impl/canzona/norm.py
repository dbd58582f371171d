"""The global gradient norm, equal to the last bit under every layout.

A matrix is owned whole, so its sum of squares is one float64 sum over the same shard in every plan.  An elementwise
parameter may be cut anywhere; its squares are summed exactly, as integers on a fixed grid of 20-bit limbs, so that the
result does not depend on the cuts.  One all-reduce of a short float64 vector completes the norm; every entry of it is
either written by one rank only or an exact integer, so the order of that sum does not matter either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from impl.canzona.buffers import FamilyBuffer
from impl.canzona.collectives import Communicator
from impl.canzona.mesh import Mesh
from impl.canzona.plan import EVERY, Piece, Plan
from impl.models.parameters import ParamSpec

LIMB_BITS = 20
"""2**33 elements may be added before a limb leaves float64's exact integers."""
TOP = 260
"""Squares of finite fp32 numbers are below 2**256; the grid starts above."""
CHUNK = 2**24
"""Elements that are summed at a time, which bounds the float64 copies."""
LIMBS = 29
"""Down to 2**-320: the square of the smallest subnormal fp32 number is 2**-298."""


def square_limbs(tensor: Tensor) -> Tensor:
    """Return the exact sum of squares of an fp32 ``tensor`` as ``[LIMBS]`` float64 integers, limb i in units of
    ``2**(TOP - (i + 1) * LIMB_BITS)``; all NaN if some element is not finite.
    """
    limbs = torch.zeros(LIMBS, dtype=torch.float64, device=tensor.device)
    rest = tensor.double().square_()  # exact: 24 + 24 bits fit into 53
    largest = rest.max().item() if rest.numel() else 0.0
    if not math.isfinite(largest):
        return limbs.fill_(math.nan)
    while largest > 0.0:
        index = (TOP - math.frexp(largest)[1]) // LIMB_BITS
        unit = 2.0 ** (TOP - (index + 1) * LIMB_BITS)
        whole = (rest * (1.0 / unit)).floor_()
        limbs[index] += whole.sum()
        rest -= whole * unit
        largest = rest.max().item()
    return limbs


def limbs_value(limbs: Tensor) -> list[float]:
    """Return the exact terms whose sum is the value of ``limbs``."""
    return [n * 2.0 ** (TOP - (i + 1) * LIMB_BITS) for i, n in enumerate(limbs.tolist())]


def square_sum(tensor: Tensor) -> Tensor:
    """Return the float64 sum of squares of a whole fp32 shard, a scalar."""
    return tensor.double().square_().sum()


def clip_scale(norm: float, limit: float) -> float:
    """Return the factor that brings ``norm`` to ``limit``: at most 1, and 1 for a limit of 0 (no clipping)."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0


def global_norm(buffers: Sequence[FamilyBuffer], plan: Plan, mesh: Mesh, world: Communicator) -> float:
    """Return the gradient norm over every trainable parameter, counting each element once; all ranks must call."""
    places = _places(plan)
    sums = torch.zeros(vector_length(plan), dtype=torch.float64, device=mesh.device)
    elementwise: list[Tensor] = []
    for buffer, piece in _counted_here(buffers, plan, mesh):
        gradient = buffer.gradient(piece.start, piece.end)
        if not buffer.family.atomic:
            elementwise.append(gradient)
            continue
        shares = _summands(plan.parameters[piece.parameter])
        parts = gradient.split([len(gradient) * share // sum(shares) for share in shares])
        for number, part in enumerate(parts):
            sums[places[piece.parameter] + number * mesh.tp + mesh.tp_rank] = square_sum(part)
    for chunk in _chunks(elementwise):
        sums[-LIMBS:] += square_limbs(chunk)
    world.all_reduce(sums, "grad_norm").wait()
    return math.sqrt(math.fsum(sums[:-LIMBS].tolist() + limbs_value(sums[-LIMBS:])))


def vector_length(plan: Plan) -> int:
    """Return how many float64 numbers the all-reduce of :func:`global_norm` sums."""
    return _places(plan)[-1] + LIMBS


def _places(plan: Plan) -> list[int]:
    """Return where each parameter's sums begin, and where the last one's end."""
    return [0, *accumulate(len(_summands(spec)) * plan.tp for spec in plan.parameters)]


def not_finite(buffers: Sequence[FamilyBuffer], plan: Plan, mesh: Mesh, world: Communicator) -> tuple[str, ...]:
    """Return the names of the parameters whose gradient has an element that is not finite; all ranks must call."""
    found = torch.zeros(len(plan.parameters), dtype=torch.int64, device=mesh.device)
    for buffer, piece in _counted_here(buffers, plan, mesh):
        found[piece.parameter] += (~buffer.gradient(piece.start, piece.end).isfinite().all()).long()
    world.all_reduce(found, "grad_norm").wait()
    return tuple(spec.name for spec, count in zip(plan.parameters, found.tolist(), strict=True) if count)


def _counted_here(buffers: Sequence[FamilyBuffer], plan: Plan, mesh: Mesh) -> Iterator[tuple[FamilyBuffer, Piece]]:
    """Yield what this rank owns, but of what several ranks hold only the first one's."""
    for buffer in buffers:
        repeated = {slot.parameter for slot in buffer.family.slots if slot.owner == EVERY}
        for piece in buffer.family.pieces(mesh.dp_rank):
            if mesh.dp_rank > 0 and piece.parameter in repeated:
                continue
            if mesh.tp_rank > 0 and plan.parameters[piece.parameter].tp_dim is None:
                continue
            yield buffer, piece


def _summands(spec: ParamSpec) -> tuple[int, ...]:
    """Return the relative sizes of the parts of a matrix that are summed apart.

    They are blocks that some plans own apart (:meth:`ParamSpec.in_blocks`), so that the norm is the same under all.
    """
    return tuple(part.numel for part in spec.in_blocks())


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield all elements of flat ``tensors``, many small ones or a part of a large one at a time."""
    batch: list[Tensor] = []
    for part in (part for tensor in tensors for part in tensor.split(CHUNK)):
        if batch and sum(map(len, batch)) + len(part) > CHUNK:
            yield torch.cat(batch)
            batch = []
        batch.append(part)
    if batch:
        yield torch.cat(batch)
