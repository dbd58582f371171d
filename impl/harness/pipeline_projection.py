"""The pipeline projection: what methods cost on clusters that are described, not used, beside published numbers."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from impl.errors import ConfigError
from impl.harness.pipeline_answers import Answer, PipelineGrid
from impl.harness.pipeline_projection_spec import Cell, ClaimEntry, PipelineProjectionSpec, PipelineProjectionTier
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.spec import parse
from impl.harness.tiers import of_tier
from impl.projection import hardware, uncertain
from impl.projection.pipeline_memory import largest_rows
from impl.projection.uncertain import Samples, exact

COLUMNS = (
    *("sweep", "case", "case_name", "model", "model_name", "hardware", "stages", "batch", "sequence", "microbatches"),
    *("dtype", "method", "method_name", "policy", "policy_name", "claim", "quantity", "part", "stage"),
    *("value", "low", "high", "unit", "kind", "status", "reason", "evidence"),
)
"""Columns of the table, one number a row.  sweep: ``case``, ``largest`` or ``claim``.  low, high: its band."""
DONE, MISFIT = "done", "does not fit"
Row = dict[str, Any]


def rows(spec: PipelineProjectionSpec, tier: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the table; raises :class:`ConfigError` for settings that cannot work."""
    part: PipelineProjectionTier = of_tier({str(t): p for t, p in spec.tiers.items()}, tier)
    grid = PipelineGrid(spec)
    for name in part.cases:
        for cell in grid.cells(grid.case(name)):
            yield from of_cell(grid, cell)
    if part.largest:
        yield from of_largest(grid)
    if part.claims:
        for claim in spec.claims:
            yield from of_claim(grid, claim)


def table(found: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows as a table with the columns of :data:`COLUMNS` and types that a missing value does not change."""
    frame = pd.DataFrame(found, columns=list(COLUMNS))
    whole = dict.fromkeys(("stages", "batch", "sequence", "microbatches", "stage"), "Int64")
    return frame.astype({**whole, **dict.fromkeys(("value", "low", "high"), "float64")})


def of_cell(grid: PipelineGrid, cell: Cell) -> Iterator[Row]:
    """Yield memory (planned) and times (projected) of one cell; of one that does not fit the times are missing."""
    found, keys = grid.answer(cell), {**_keys(grid, cell), "sweep": "case"}
    state = {"status": MISFIT, "reason": found.misfit} if found.misfit else {"status": DONE}
    planned, projected = {**keys, **state, "kind": "planned"}, {**keys, **state, "kind": "projected"}
    for stage in found.memory:
        yield {**planned, "quantity": "memory", "stage": stage.stage, "value": stage.total, "unit": "B"}
    if found.limit is not None:
        yield {**planned, "quantity": "card", "value": found.limit, "unit": "B"}
    fullest = {**planned, "quantity": "memory_part", "stage": found.fullest.stage, "unit": "B"}
    for name, count in {**found.fullest.parts(), "host": float(found.fullest.host)}.items():
        yield {**fullest, "part": name, "value": count}
    own = found.projection
    times: dict[str, tuple[Samples | None, str]] = {
        "samples_per_s": (own and own.samples_per_s, "samples/s"),
        "update_s": (own and own.update_s, "s"),
        "ratio": (grid.ratio(cell), "times"),
        "bubble": (own and own.bubble, "share"),
        "exposed_s": (own and own.exposed_s, "s"),
        "norm_share": (own and own.norm_share, "share"),
    }
    source = {"evidence": _evidence_text(own.evidence)} if own else {}
    for name, (samples, unit) in times.items():
        yield {**projected, **source, "quantity": name, "unit": unit, **_band(samples)}


def of_largest(grid: PipelineGrid) -> Iterator[Row]:
    """Yield the largest microbatch that fits (planned) for each combination, 0 where not one sequence does."""
    spec, asked = grid.spec, grid.spec.largest
    methods = [m for m in spec.methods if m.id in asked.methods]
    policies = [p for p in spec.policies if p.id in asked.policies]
    cards = {kind: hardware.load(f"{kind}x1").memory_bytes for kind in asked.hardware}
    for model, stages, method, policy in itertools.product(asked.models, asked.stages, methods, policies):
        own = {"model": model, "stages": stages, "method": method.method, "method_settings": method.settings}
        chosen = policy.model_dump(exclude={"id", "name"})
        run = parse(PipelineSpec, {**spec.base, "batch": stages, **own, **chosen})
        found = largest_rows(run, asked.dtype, list(cards.values()), capacity_bytes=spec.capacity_bytes)
        for kind, most in zip(cards, found, strict=True):
            yield {
                **{"sweep": "largest", "hardware": kind, "stages": stages, "dtype": asked.dtype, "kind": "planned"},
                **{"model": model, "model_name": grid.model_name(model), "sequence": run.sequence},
                **{"method": method.id, "method_name": method.name, "policy": policy.id, "policy_name": policy.name},
                **{"quantity": "largest_microbatch", "value": most, "unit": "sequences"},
                "status": DONE if most else MISFIT,
            }


def of_claim(grid: PipelineGrid, claim: ClaimEntry) -> Iterator[Row]:
    """Yield ours beside a published number: ``part`` is ``baseline`` or ``value``, as in the published table."""
    shared = {"sweep": "claim", "claim": claim.id, "quantity": claim.quantity, "reason": claim.reason}
    if claim.of is None:
        yield {**shared, "part": "value", "kind": "planned", "status": DONE}
        return
    of = grid.answer(claim.of)
    base = grid.answer(claim.baseline) if claim.baseline else None
    keys = {**_keys(grid, claim.of), **shared}
    if claim.measure in ("memory", "samples_per_s"):
        for part, cell, found in (("baseline", claim.baseline, base), ("value", claim.of, of)):
            if found is not None and cell is not None:
                yield {**_keys(grid, cell), **shared, "part": part, **_single(claim, found)}
        return
    if base is None:
        raise ConfigError(f"claim {claim.id}: {claim.measure} needs a baseline")
    if claim.measure == "memory_saved":
        saved = 100 * (1 - of.fullest.total / base.fullest.total)
        yield {**keys, "part": "value", "kind": "planned", "status": DONE, "value": saved, "unit": "%"}
    elif of.projection is None or base.projection is None:
        yield {**keys, "part": "value", "kind": "projected", "status": MISFIT}
    else:
        ratio = of.projection.update_s / base.projection.update_s
        added = claim.measure == "time_added"
        numbers = _band(100 * (ratio - 1) if added else ratio)
        unit = "%" if added else "times"
        yield {**keys, "part": "value", "kind": "projected", "status": DONE, "unit": unit, **numbers}


def _single(claim: ClaimEntry, found: Answer) -> Row:
    if claim.measure == "memory":
        return {"kind": "planned", "status": DONE, "unit": "GB", **_band(exact(found.fullest.total / 1e9))}
    if found.projection is None:
        return {"kind": "projected", "status": MISFIT, "unit": "samples/s"}
    return {"kind": "projected", "status": DONE, "unit": "samples/s", **_band(found.projection.samples_per_s)}


def _keys(grid: PipelineGrid, cell: Cell) -> Row:
    case, method, policy = grid.parts(cell)
    spec = grid.spec.run(case, method, policy)
    own = grid.answer(cell)
    return {
        **{"case": case.id, "case_name": case.name, "model": case.model, "hardware": case.hardware},
        "model_name": grid.model_name(case.model),
        **{"stages": case.stages, "batch": spec.batch, "sequence": spec.sequence, "dtype": case.dtype},
        "microbatches": own.microbatches,
        **{"method": method.id, "method_name": method.name, "policy": policy.id, "policy_name": policy.name},
    }


def _band(samples: Samples | None) -> Row:
    if samples is None:
        return dict.fromkeys(("value", "low", "high"), math.nan)
    band = uncertain.band(samples)
    return {"value": band.value, "low": band.low, "high": band.high}


def _evidence_text(shares: dict[str, float]) -> str:
    """Return the sources of a projected number with their shares as JSON, largest first."""
    return json.dumps({k: round(v, 4) for k, v in sorted(shares.items(), key=lambda item: -item[1])})
