"""Canzona: cuts moved to parameter borders and balanced over buckets, micro-groups balanced over hosts."""

from __future__ import annotations

from collections.abc import Sequence

from impl.canzona.costs import weights
from impl.canzona.families import assemble, owned_matrices, padded_buckets, scattered, zero1
from impl.canzona.layout import own_whole
from impl.canzona.partition import alpha_cuts, start_index_cuts
from impl.canzona.plan import Bucket, Plan
from impl.canzona.strategies import Problem, strategy
from impl.canzona.tp_groups import micro_groups


@strategy("canzona")
def plan_canzona(problem: Problem) -> Plan:
    """Return the alpha-balanced plan with micro-groups of ``options.tp_mode``.

    The start-index plan is kept where the alpha plan does not lower the largest load in ``options.cost``, unless
    ``options.fallback`` is off.
    """
    problem = problem.in_blocks()
    buckets = padded_buckets(problem, atomic=True)
    cuts = alpha_cuts(buckets, problem.dp, problem.options.alpha) if buckets else ()
    chosen = tuple(own_whole(b, c) for b, c in zip(buckets, cuts, strict=True))
    fallback_used = False
    if problem.options.fallback:
        plain = tuple(own_whole(b, start_index_cuts(b, problem.dp)) for b in buckets)
        # The mean is the same, so the ratio max / mean is smaller exactly where the maximum is.
        fallback_used = bool(buckets) and largest_load(problem, chosen) >= largest_load(problem, plain)
        chosen = plain if fallback_used else chosen
    families = scattered(problem, chosen, atomic=True) + zero1(problem)
    groups = micro_groups(problem, owned_matrices(families, problem.dp), problem.options.tp_mode)
    return assemble("canzona", problem, families, groups, fallback_used=fallback_used)


def largest_load(problem: Problem, buckets: Sequence[Bucket]) -> float:
    """Return the load of the busiest DP rank, in the cost that the options name, of whole matrices."""
    weight = weights(problem)
    loads = [0.0] * problem.dp
    for slot in (s for b in buckets for s in b.slots):
        assert slot.owner is not None, "an atomic parameter has an owner"
        loads[slot.owner] += weight(slot.parameter)
    return max(loads)
