"""ASC: asynchronous compute without load balance, the start-index rule and hosts in order of arrival."""

from __future__ import annotations

from impl.canzona.families import assemble, owned_matrices, padded_buckets, scattered, zero1
from impl.canzona.layout import own_whole
from impl.canzona.partition import start_index_cuts
from impl.canzona.plan import Plan
from impl.canzona.strategies import Problem, strategy
from impl.canzona.tp_groups import micro_groups


@strategy("asc")
def plan_asc(problem: Problem) -> Plan:
    """Return the plan in which a matrix belongs to the rank in whose equal share of the bucket it starts."""
    problem = problem.in_blocks()
    buckets = tuple(own_whole(b, start_index_cuts(b, problem.dp)) for b in padded_buckets(problem, atomic=True))
    families = scattered(problem, buckets, atomic=True) + zero1(problem)
    groups = micro_groups(problem, owned_matrices(families, problem.dp), "no")
    return assemble("asc", problem, families, groups)
