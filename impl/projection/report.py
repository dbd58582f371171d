"""A projection as plain data and as text: every number with its band and what it rests on."""

from __future__ import annotations

from typing import Any

from impl.projection.training import NAMES, Projection
from impl.projection.uncertain import Band, Samples, band

FIELDS = {
    "iteration_s": "iteration",
    "forward_backward_s": "forward_backward",
    "optimizer_s": "optimizer",
    "optimizer_step_s": "optimizer_step",
    "parameter_gather_s": "parameter_gather",
    "exposed_communication_s": "exposed_communication",
    "waiting_for_ranks_s": "waiting_for_ranks",
    "tokens_per_s": "tokens_per_s",
    "mfu": "mfu",
}
"""Numbers of the report by the attribute of :class:`Projection` that holds their samples."""
TITLES = {
    "iteration_s": "iteration",
    "forward_backward_s": "forward and backward",
    "optimizer_s": "optimizer",
    "optimizer_step_s": "  its step",
    "parameter_gather_s": "  its blocking gather of parameters",
    "exposed_communication_s": "exposed communication",
    "waiting_for_ranks_s": "waiting for slower ranks",
}
COVERED = "90 of 100 draws of the inputs lie in it"


def report(projection: Projection) -> dict[str, Any]:
    """Return the JSON fields of ``impl project``.

    A step that does not fit into the memory has no times: they are null, and ``fits`` is false with the line that says
    why in ``reason``.
    """
    held, fits = projection.memory, projection.misfit is None
    samples: dict[str, Samples | None] = {
        name: getattr(projection, attribute) if fits else None for name, attribute in FIELDS.items()
    }
    bands = {name: band(values) for name, values in samples.items() if values is not None}
    phases = {name: band(values) for name, values in projection.phases.items()} if fits else {}
    evidence = {f"{name}_s": projection.evidence(name) for name in NAMES} if fits else {}
    evidence |= {f"memory_bytes.{part}": {source: 1.0} for part, source in held.evidence.items()}
    return {
        "kind": "projected",
        **{name: bands[name].value if name in bands else None for name in FIELDS},
        "memory_bytes": {**held.parts, "total": held.total},
        "memory_rank": {"dp": held.rank[0], "tp": held.rank[1]},
        "fits": fits,
        "reason": projection.misfit,
        "phases": {name: found.value for name, found in phases.items()} if fits else None,
        "band": {
            name: _interval(found) for name, found in (bands | {f"phases.{n}": b for n, b in phases.items()}).items()
        },
        "band_covers": COVERED,
        "evidence": evidence,
    }


def readable(found: dict[str, Any]) -> str:
    """Return the report as text; ``found`` also holds the settings of ``impl project``."""
    version = f" {found['nv_version']}" if found["nv_version"] else ""
    work = found["workload"]
    lines = [
        f"{found['model']}, {found['strategy']}{version}, {found['optimizer']}, DP {found['dp']} x TP {found['tp']} on "
        f"{found['hardware']}   [projected]",
        f"{work['batch']} sequences of {work['sequence']} tokens a step, {work['microbatches']} microbatches a rank, "
        f"{work['dtype']}, recompute {work['recompute']}",
        "",
    ]
    lines += _times(found) if found["fits"] else [f"does not fit: {found['reason']}"]
    return "\n".join([*lines, "", *_memory(found), "", *_evidence(found)])


def _times(found: dict[str, Any]) -> list[str]:
    bands = found["band"]
    rows = [f"{'seconds':<40}{'nominal':>10}{'low':>10}{'high':>10}   ({COVERED})"]
    for name, title in TITLES.items():
        rows.append(f"{title:<40}{found[name]:>10.4f}{bands[name][0]:>10.4f}{bands[name][1]:>10.4f}")
    for name, seconds in found["phases"].items():
        low, high = bands[f"phases.{name}"]
        rows.append(f"{'phase ' + name:<40}{seconds:>10.4f}{low:>10.4f}{high:>10.4f}")
    low, high = bands["tokens_per_s"]
    rows.append(f"{'tokens a second':<40}{found['tokens_per_s']:>10,.0f}{low:>10,.0f}{high:>10,.0f}")
    if found["mfu"] is not None:
        low, high = bands["mfu"]
        rows.append(f"{'MFU (bf16 peak, no recomputation)':<40}{found['mfu']:>10.3f}{low:>10.3f}{high:>10.3f}")
    return rows


def _memory(found: dict[str, Any]) -> list[str]:
    rank = found["memory_rank"]
    rows = [f"GB on rank dp {rank['dp']} tp {rank['tp']}, which needs most; not all at once (see the total)"]
    return rows + [f"{name:<40}{count / 1e9:>10.2f}" for name, count in found["memory_bytes"].items()]


def _evidence(found: dict[str, Any]) -> list[str]:
    """Return what each time rests on, largest share first."""
    rows = ["rests on"]
    for name, sources in found["evidence"].items():
        if name.startswith("memory_bytes."):
            continue
        rows.append(f"  {name}")
        rows += [f"    {share:>5.1%}  {source}" for source, share in sorted(sources.items(), key=lambda item: -item[1])]
    return rows


def _interval(found: Band) -> list[float]:
    return [found.low, found.high]
