"""How even a plan is: loads per rank, their ratios and the bounds that no plan can beat.

Every number is *planned*: exact arithmetic on shapes.  Ratios are the largest load over the mean.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from impl.canzona.costs import flops_of, memory_bytes, published_flops_of
from impl.canzona.plan import EVERY, Family, MicroGroup, Plan
from impl.canzona.strategies import Cost

WARN_ABOVE = 1.5
"""Largest load over the mean from which on a report warns."""


def ratio(loads: Sequence[float]) -> float | None:
    """Return the largest load over the mean; None if there is no load at all."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else None


def report(plan: Plan, costs: Sequence[Cost], seconds: float | None = None) -> dict[str, Any]:
    """Return the balance of ``plan`` as plain data (fields in docs/numbers.md).

    costs: for each parameter of the plan its optimizer.
    seconds: wall time of planning, for the record.

    Ratios concern matrices only and are None if there are none; ``all_parameters`` includes elementwise ones.
    """
    matrices = [s.parameter for f in plan.families if f.atomic for s in f.slots]
    flops, published, memory = _measures(plan, costs)
    owned = _owned(plan)
    loads = {
        "flops": [sum(map(flops, o)) for o in owned],
        "memory_bytes": [sum(map(memory, o)) for o in owned],
        "elements": [sum(plan.parameters[i].local_numel(plan.tp) for i in o) for o in owned],
    }
    groups = [group for rank in plan.micro_groups for group in rank]
    out = {
        "kind": "planned",
        "strategy": plan.strategy,
        "version": plan.version,
        "dp": plan.dp,
        "tp": plan.tp,
        "options": plan.options,
        "matrices": len(matrices),
        "flops_ratio": ratio(loads["flops"]),
        "flops_ratio_tp_local": ratio([sum(map(published, o)) for o in owned]),
        "memory_ratio": ratio(loads["memory_bytes"]),
        "per_gpu_flops_ratio": _per_gpu_ratio(plan, matrices, flops),
        "lower_bound": _lower_bound(plan, matrices, flops),
        "comm_ratio": _comm_ratio(plan),
        "padding": _padding(plan),
        "all_parameters": _all_parameters(plan, costs),
        "fallback_used": plan.fallback_used,
        "loads": loads,
        "micro_groups": max(map(len, plan.micro_groups), default=0),
        "over_capacity": sorted({plan.parameters[g.parameters[0]].name for g in groups if g.over_capacity}),
        "idle_ranks": sum(not o for o in owned) if matrices else 0,
        "plan_seconds": seconds,
    }
    return {**out, "warnings": warnings(out)}


def warnings(balance: dict[str, Any]) -> list[str]:
    """Return one line for each thing in a report that a user should know before starting a run."""
    found = []
    named = {
        "matrix FLOPs": balance["flops_ratio"],
        "matrix memory": balance["memory_ratio"],
        "memory of all parameters": balance["all_parameters"]["memory_ratio"],
    }
    for what, value in named.items():
        if value is not None and value > WARN_ABOVE:
            found.append(f"{what}: the busiest DP rank has {value:.2f} times the mean (limit {WARN_ABOVE})")
    if balance["idle_ranks"]:
        found.append(f"{balance['idle_ranks']} of {balance['dp']} DP ranks own no matrix")
    if over := balance["over_capacity"]:
        names = ", ".join(over[:3]) + (f" and {len(over) - 3} more" if len(over) > 3 else "")
        capacity = balance["options"]["capacity_bytes"]
        found.append(f"larger than the micro-group capacity of {capacity} bytes, so in groups of their own: {names}")
    return found


Measure = Callable[[int], float]


def _measures(plan: Plan, costs: Sequence[Cost]) -> tuple[Measure, Measure, Measure]:
    """Return FLOPs of the whole matrix, the published FLOPs of its TP shard, and state bytes of the whole."""
    flops = cache(lambda i: flops_of(plan.parameters[i], costs[i]))
    published = cache(lambda i: published_flops_of(plan.parameters[i], costs[i], plan.tp))
    memory = cache(lambda i: memory_bytes(plan.parameters[i], costs[i]))
    return flops, published, memory


def _owned(plan: Plan) -> list[list[int]]:
    """Return the matrices that each DP rank updates."""
    owned: list[list[int]] = [[] for _ in range(plan.dp)]
    for slot in (s for f in plan.families if f.atomic for s in f.slots):
        for mine in owned if slot.owner in (EVERY, None) else [owned[slot.owner]]:
            mine.append(slot.parameter)
    return owned


def _per_gpu_ratio(plan: Plan, matrices: Sequence[int], flops: Measure) -> float | None:
    """Return the busiest GPU's work, with a barrier after each micro-group, over an even share of one pass."""
    total = sum(map(flops, matrices))
    if not total:
        return None

    @cache
    def seconds(group: MicroGroup) -> float:
        hosts = [0.0] * plan.tp
        for parameter, host in zip(group.parameters, group.hosts, strict=True):
            for h in range(plan.tp) if host == EVERY else (host,):
                hosts[h] += flops(parameter)
        return max(hosts)

    return max(sum(map(seconds, groups)) for groups in plan.micro_groups) / (total / (plan.dp * plan.tp))


def _lower_bound(plan: Plan, matrices: Sequence[int], flops: Measure) -> dict[str, float] | None:
    total, largest = sum(map(flops, matrices)), max(map(flops, matrices), default=0)
    if not total:
        return None
    return {"dp": max(1.0, largest * plan.dp / total), "gpu": max(1.0, largest * plan.dp * plan.tp / total)}


def _comm_ratio(plan: Plan) -> float | None:
    """Return the largest part that one rank sends over the mean, for the matrices' parameter all-gather.

    Per bucket, weighted by its size, where buckets are gathered one by one; None where nothing is gathered.
    """
    family = next((f for f in plan.families if f.atomic), None)
    if family is None or family.synchronization == "none":
        return None
    if family.synchronization == "once":
        return ratio([sum(p.end - p.start for p in family.pieces(r)) for r in range(plan.dp)])
    largest = sum(max(b - a for a, b in zip(k.cuts, k.cuts[1:], strict=False)) for k in family.buckets)
    return largest * plan.dp / sum(k.cuts[-1] - k.cuts[0] for k in family.buckets)


def _padding(plan: Plan) -> float | None:
    """Return the padding of the matrices' buffer as a fraction of its real elements."""
    family = next((f for f in plan.families if f.atomic), None)
    if family is None:
        return None
    return family.numel / sum(s.end - s.start for s in family.slots) - 1


def _all_parameters(plan: Plan, costs: Sequence[Cost]) -> dict[str, float | None]:
    """Return the ratios of elements and state bytes over DP ranks, elementwise parameters included."""
    elements, memory = [0.0] * plan.dp, [0.0] * plan.dp
    for family in plan.families:
        for rank, parameter, length in _lengths(family, plan.dp):
            spec = plan.parameters[parameter]
            elements[rank] += length
            memory[rank] += memory_bytes(spec, costs[parameter]) * length / spec.local_numel(plan.tp)
    return {"elements_ratio": ratio(elements), "memory_ratio": ratio(memory)}


def _lengths(family: Family, dp: int) -> list[tuple[int, int, int]]:
    """Return (DP rank, parameter, elements that it updates) of a whole family."""
    out = []
    for bucket in family.buckets:
        for slot in bucket.slots:
            if slot.owner is not None:
                ranks = range(dp) if slot.owner == EVERY else (slot.owner,)
                out += [(r, slot.parameter, slot.end - slot.start) for r in ranks]
                continue
            rank, at = bisect_right(bucket.cuts, slot.start) - 1, slot.start
            while at < slot.end:
                end = min(slot.end, bucket.cuts[rank + 1])
                out.append((rank, slot.parameter, end - at))
                rank, at = rank + 1, end
    return out
