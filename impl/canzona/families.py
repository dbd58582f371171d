"""The pieces from which every strategy's plan is put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

from impl.canzona.layout import lay_out, share_out
from impl.canzona.plan import EVERY, Bucket, Family, MicroGroup, Plan
from impl.canzona.strategies import Problem
from impl.errors import ConfigError


def name_of(atomic: bool) -> str:
    """Return the name of a family."""
    return "matrix" if atomic else "elementwise"


def optimizer_of(problem: Problem, members: Sequence[int]) -> str:
    """Return the name of the one optimizer of ``members``; raises :class:`ConfigError` if there are several."""
    names = sorted({problem.costs[i].name for i in members})
    if len(names) != 1:
        raise ConfigError(f"a plan has one matrix and one elementwise optimizer: choose one of {', '.join(names)}")
    return names[0]


def padded_buckets(problem: Problem, *, atomic: bool) -> tuple[Bucket, ...]:
    """Return the buckets of one family in the layout of Megatron's distributed optimizer."""
    size = problem.options.bucket_size(problem.dp)
    return lay_out(problem.parameters, problem.members(atomic=atomic), problem.tp, size, problem.dp)


def scattered(problem: Problem, buckets: tuple[Bucket, ...], *, atomic: bool) -> tuple[Family, ...]:
    """Return the family whose gradients are reduce-scattered along the cuts of ``buckets``; nothing if it is empty."""
    members = problem.members(atomic=atomic)
    if not members:
        return ()
    name = optimizer_of(problem, members)
    return (Family(name_of(atomic), name, atomic, "reduce-scatter", "per-bucket", buckets),)


def zero1(problem: Problem) -> tuple[Family, ...]:
    """Return the elementwise family under stock ZeRO-1: equal cuts, which may run through parameters."""
    buckets = tuple(share_out(b, problem.dp) for b in padded_buckets(problem, atomic=False))
    return scattered(problem, buckets, atomic=False)


def all_reduced(
    problem: Problem, owners: Mapping[int, int], synchronization: Literal["once", "none"]
) -> tuple[Family, ...]:
    """Return both families with all-reduced gradients in buffers without padding.

    owners: for each parameter the DP rank that updates it, or EVERY.
    """
    families = []
    for atomic in (True, False):
        members = problem.members(atomic=atomic)
        if not members:
            continue
        size = problem.options.bucket_size(problem.dp)
        buckets = tuple(
            dataclasses.replace(b, slots=tuple(dataclasses.replace(s, owner=owners[s.parameter]) for s in b.slots))
            for b in lay_out(problem.parameters, members, problem.tp, size, None)
        )
        name = optimizer_of(problem, members)
        families.append(Family(name_of(atomic), name, atomic, "all-reduce", synchronization, buckets))
    return tuple(families)


def owned_matrices(families: Sequence[Family], dp: int) -> list[list[int]]:
    """Return for each DP rank the matrices that it updates, in registration order."""
    owned: list[list[int]] = [[] for _ in range(dp)]
    for family in families:
        for slot in family.slots if family.atomic else ():
            for rank in range(dp) if slot.owner == EVERY else (slot.owner,):
                assert rank is not None, f"matrix {slot.parameter} has no owner"
                owned[rank].append(slot.parameter)
    return [sorted(matrices) for matrices in owned]


def assemble(
    strategy: str,
    problem: Problem,
    families: tuple[Family, ...],
    micro_groups: Sequence[tuple[MicroGroup, ...]],
    *,
    version: str | None = None,
    fallback_used: bool = False,
) -> Plan:
    """Return the plan of ``problem`` with these parts."""
    return Plan(
        strategy=strategy,
        version=version,
        dp=problem.dp,
        tp=problem.tp,
        parameters=problem.parameters,
        families=families,
        micro_groups=tuple(micro_groups),
        options=problem.options.model_dump(mode="json"),
        fallback_used=fallback_used,
    )
