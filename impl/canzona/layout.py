"""Megatron's layout of a flat buffer: which parameter lies where, and where buckets end.

The rule of ``megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer`` (0.16.1; unchanged in 0.19).
Positions are in elements of the buffer of one tensor-parallel rank.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import groupby

from impl.canzona.plan import Bucket, Slot
from impl.models.parameters import ParamSpec

ALIGNMENT = 64
"""Elements to which a parameter's start is rounded up (128 bytes of bf16)."""


def round_up(value: int, divisor: int) -> int:
    """Return the smallest multiple of ``divisor`` that is at least ``value``."""
    return -(-value // divisor) * divisor


def bucket_divisor(dp: int) -> int:
    """Return the number of elements of which a padded bucket's end is a multiple."""
    return math.lcm(dp, 128)


def lay_out(
    parameters: Sequence[ParamSpec], members: Sequence[int], tp: int, bucket_elements: int, dp: int | None
) -> tuple[Bucket, ...]:
    """Return the buckets of the buffer that holds ``members``, their owners and cuts still open.

    members: indices into ``parameters`` in registration order; the buffer runs in reverse, as gradients become ready.
    bucket_elements: a bucket closes with the parameter that brings it to this size, so it overshoots.
    dp: ranks over which a bucket must divide; None for Megatron without its distributed optimizer, which pads neither
        parameter starts nor bucket ends.
    """
    align, divisor = (ALIGNMENT, bucket_divisor(dp)) if dp else (1, 1)
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    start = end = 0
    modules = [list(group) for _, group in groupby(members, key=lambda i: parameters[i].module)]
    for blocks in reversed(modules):
        end = round_up(end, align)
        for index in blocks:  # of one module's parameter, which is contiguous
            at, end = end, end + parameters[index].local_numel(tp)
            slots.append(Slot(index, at, end, None))
        if end - start >= bucket_elements:
            end = round_up(end, divisor)
            buckets.append(Bucket(start, end, tuple(slots)))
            slots, start = [], end
    if slots:
        buckets.append(Bucket(start, round_up(end, divisor), tuple(slots)))
    return tuple(buckets)


def equal_cuts(bucket: Bucket, dp: int) -> tuple[int, ...]:
    """Return the cuts of stock ZeRO-1: ``dp`` equal segments of the padded bucket."""
    share = (bucket.end - bucket.start) // dp
    return tuple(bucket.start + r * share for r in range(dp + 1))


def own_whole(bucket: Bucket, cuts: Sequence[int]) -> Bucket:
    """Return ``bucket`` with ``cuts``, every parameter owned by the rank whose segment holds it whole."""
    slots = tuple(dataclasses.replace(s, owner=bisect_left(cuts, s.end) - 1) for s in bucket.slots)
    return dataclasses.replace(bucket, slots=slots, cuts=tuple(cuts))


def share_out(bucket: Bucket, dp: int) -> Bucket:
    """Return ``bucket`` with equal cuts that may run through parameters (elementwise ZeRO-1)."""
    return dataclasses.replace(bucket, cuts=equal_cuts(bucket, dp))
