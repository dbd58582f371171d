"""What a whole matrix costs: elements, bytes of optimizer state, or operations."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from impl.canzona.strategies import Cost, Problem
from impl.models.parameters import ParamSpec

MASTER_BYTES = 4
"""Bytes of the fp32 master weight of one element."""


def memory_bytes(spec: ParamSpec, cost: Cost) -> int:
    """Return the bytes of master and optimizer state of the whole tensor ``spec``."""
    return MASTER_BYTES * spec.numel + sum(map(cost.state_bytes, spec.matrices))


def flops_of(spec: ParamSpec, cost: Cost) -> float:
    """Return the operations of one update of the whole tensor ``spec``."""
    return sum(map(cost.flops, spec.matrices))


def published_flops_of(spec: ParamSpec, cost: Cost, tp: int) -> float:
    """Return the same of its shard on one of ``tp`` ranks, in the papers' convention."""
    return sum(map(cost.published_flops, spec.local_matrices(tp)))


def weights(problem: Problem) -> Callable[[int], float]:
    """Return the function that gives the weight of a parameter (by index) in the cost that the options name.

    Weights are of whole tensors, because that is what an owner or host computes and stores; the released code uses
    tensor-parallel shards, which misjudges the work (docs/numbers.md).
    """

    @cache
    def weight(index: int) -> float:
        spec, cost = problem.parameters[index], problem.costs[index]
        if problem.options.cost == "numel":
            return spec.numel
        if problem.options.cost == "memory":
            return memory_bytes(spec, cost)
        return flops_of(spec, cost)

    return weight
