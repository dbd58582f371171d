"""SC: synchronous compute.  Gradients are all-reduced, and every rank updates and stores every parameter."""

from __future__ import annotations

from impl.canzona.families import all_reduced, assemble, owned_matrices
from impl.canzona.plan import EVERY, Plan
from impl.canzona.strategies import Problem, strategy
from impl.canzona.tp_groups import micro_groups


@strategy("sc")
def plan_sc(problem: Problem) -> Plan:
    """Return the plan in which every DP and TP rank does all of the work."""
    families = all_reduced(problem, dict.fromkeys(range(len(problem.parameters)), EVERY), "none")
    groups = micro_groups(problem, owned_matrices(families, problem.dp), "every")
    return assemble("sc", problem, families, groups)
