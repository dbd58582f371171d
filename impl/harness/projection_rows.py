"""The table of a projection experiment: times with their bands, bytes of memory, and what could not be projected."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from impl.canzona.strategies import PlanOptions
from impl.errors import ConfigError
from impl.harness.planning import Workload as Parameters
from impl.harness.planning import plan_workload, workload
from impl.harness.projection_spec import Case, ProjectionSpec
from impl.models import catalogue
from impl.optimizers.base import create
from impl.optimizers.routing import ELEMENTWISE
from impl.projection.machine import Machine
from impl.projection.measured import load_machine
from impl.projection.training import NAMES, Projection, project
from impl.projection.uncertain import Samples, band, exact

QUANTITIES = {
    "iteration": "s",
    "forward_backward": "s",
    "optimizer": "s",
    "optimizer_step": "s",
    "parameter_gather": "s",
    "exposed_communication": "s",
    "waiting_for_ranks": "s",
    "rest": "s",
    "tokens_per_s": "tokens/s",
    "mfu": "share",
}
"""What is projected of a step (:class:`impl.projection.training.Projection`), with its unit."""
CLAIMS = "claims"
"""The grid of the rows that answer published claims, each claim's id in ``varied``."""
CASE = ("experiment", "grid", "model", "model_name", "optimizer", "optimizer_name", "system", "system_name")
SETTINGS = ("strategy", "nv_version", "tp_update", "dp", "tp", "gpus", "hardware", "sequence", "batch", "microbatches")
COLUMNS = (
    *(*CASE, *SETTINGS, "varied", "reference", "status", "reason"),
    *("quantity", "value", "low", "high", "ratio", "ratio_low", "ratio_high", "unit", "kind", "evidence"),
    *("note", "comparable"),
)
"""Columns of the table: a row per case and quantity.

comparable: of a claim, whether a ratio to the published value says anything.
low, high: the band of the inputs' draws.  ratio: of the value to the reference system's, with the band of the paired
draws.  kind: ``projected`` for times, ``planned`` for bytes of memory.  evidence: share of the time by source, JSON.
varied: the setting that a sweep changes, as ``name=value``.  note: what the experiment says about the grid.
"""


def rows(spec: ProjectionSpec, tier: str, experiment: str, root: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of every projection of ``tier``.

    A case that cannot be (a model that TP does not divide, an update that the optimizer does not have, a missing
    measurement) or does not fit into memory gives a row with its status and the reason, and no times.

    root: folder of the project, for the kernel table.
    """
    projector, claimed = _Projector(spec, root), _Claimed(spec)
    for _, group in itertools.groupby(spec.cases(tier), key=lambda case: case.comparison):
        cases = list(group)
        found = {case.system.id: projector.attempt(case) for case in cases}
        reference = _usable(found.get(spec.reference))
        for case in cases:
            keys = {**case.keys(), "experiment": experiment, "reference": spec.reference}
            keys["note"] = spec.notes.get(case.grid.id)
            one = found[case.system.id]
            if isinstance(one, ConfigError):
                yield {**keys, "status": "not possible", "reason": str(one), "kind": "projected"}
                continue
            machine = projector.machine(case)
            yield from ({**keys, "status": "done", **row} for row in _memory_rows(one, machine))
            if one.misfit is not None:
                yield {**keys, "status": "does not fit", "reason": one.misfit, "kind": "projected"}
                continue
            claimed.note(case, one, machine)
            yield from ({**keys, "status": "done", **row} for row in _time_rows(one, reference))
    yield from ({"experiment": experiment, "grid": CLAIMS, **row} for row in claimed.rows())


def _usable(found: Projection | ConfigError | None) -> Projection | None:
    return found if isinstance(found, Projection) and found.misfit is None else None


class _Projector:
    """Projects cases, keeping what the next one may share."""

    def __init__(self, spec: ProjectionSpec, root: Path) -> None:
        self._kernels = None if spec.kernels is None else root / spec.kernels
        self.machine_named = lru_cache(maxsize=None)(self._machine)
        self._parameters = lru_cache(maxsize=4)(self._load)

    def machine(self, case: Case) -> Machine:
        """Return the machine of a case."""
        return self.machine_named(case.machine)

    def attempt(self, case: Case) -> Projection | ConfigError:
        """Return the projection, or why there is none."""
        try:
            return self._project(case)
        except ConfigError as error:
            return error

    def _project(self, case: Case) -> Projection:
        entry = case.optimizer
        settings = json.dumps(entry.settings, sort_keys=True)
        parameters = self._parameters(
            case.model, case.tp, entry.id, settings, case.options.split, case.options.split_qkv
        )
        planned = plan_workload(parameters, case.system.strategy, case.dp, case.options)
        return project(
            planned.plan,
            planned.costs,
            catalogue.load(case.model),
            case.workload,
            self.machine(case),
            tp_update=case.system.tp_update,
            uneven=case.system.uneven,
        )

    def _machine(self, name: str) -> Machine:
        return load_machine(name, self._kernels)

    def _load(self, model: str, tp: int, optimizer: str, settings: str, split: Any, split_qkv: Any) -> Parameters:
        rules = {optimizer: create(optimizer, json.loads(settings)), ELEMENTWISE: create(ELEMENTWISE)}
        options = PlanOptions(split=split, split_qkv=split_qkv)
        return workload(catalogue.load(model), optimizer, tp, rules=rules, options=options)


class _Claimed:
    """What the experiment's claims are about."""

    def __init__(self, spec: ProjectionSpec) -> None:
        self._claims = spec.claims
        self._names = {system.id: system.name for system in spec.systems}
        self._found: dict[tuple[Any, ...], Samples] = {}

    def note(self, case: Case, found: Projection, machine: Machine) -> None:
        """Keep what some claim is about of a case."""
        for claim in self._claims:
            place = claim.grid, claim.model, claim.optimizer, claim.dp, claim.tp
            here = case.grid.id, case.model, case.optimizer.id, case.dp, case.tp
            if place == here and case.system.id in (claim.baseline, claim.system):
                self._found[claim.id, case.system.id] = _claimed(found, claim.quantity, machine)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for either system of each claim; ``ratio`` is baseline over system, ``reason`` the claim's."""
        for claim in self._claims:
            ours = self._found.get((claim.id, claim.system))
            for system in dict.fromkeys((claim.baseline, claim.system)):
                if system is None:
                    continue
                keys = {name: getattr(claim, name) for name in ("model", "optimizer", "dp", "tp", "quantity", "reason")}
                keys |= {"varied": claim.id, "system": system, "system_name": self._names[system]}
                kind = "projected" if claim.quantity in QUANTITIES else "planned"
                keys |= {"reference": claim.baseline, "kind": kind, "comparable": claim.comparable}
                keys |= {"unit": QUANTITIES.get(claim.quantity, "share")}
                samples = self._found.get((claim.id, system))
                if samples is None:
                    yield {**keys, "status": "not projected"}
                    continue
                row = {**keys, "status": "done", **_banded("", samples)}
                base = self._found.get((claim.id, claim.baseline or ""))
                if system == claim.system and base is not None and ours is not None:
                    row |= _banded("ratio", base / ours)
                yield row


def _claimed(found: Projection, quantity: str, machine: Machine) -> Samples:
    """Return the samples of a claim's quantity: a time, or the planned ``temporary_share`` of the card's memory.

    That is what comes and goes in a step without activations: the exchange of micro-groups, one gather of all
    parameters, or the loss, whichever is largest.
    """
    if quantity != "temporary_share":
        return getattr(found, quantity)
    assert machine.memory_bytes is not None, "hardware of an experiment has a memory"
    largest = max(found.memory.parts[part] for part in ("micro_groups", "gathered", "logits"))
    return exact(largest / machine.memory_bytes)


def _time_rows(found: Projection, reference: Projection | None) -> Iterator[dict[str, Any]]:
    for quantity, unit in QUANTITIES.items():
        samples: Samples | None = getattr(found, quantity)
        if samples is None:
            continue
        row: dict[str, Any] = {**_banded("", samples), "quantity": quantity, "unit": unit, "kind": "projected"}
        if quantity in NAMES:
            row["evidence"] = json.dumps(found.evidence(quantity))
        if reference is not None:
            base: Samples | None = getattr(reference, quantity)
            if base is not None and np.all(base > 0):
                row |= _banded("ratio", samples / base)
        yield row


def _memory_rows(found: Projection, machine: Machine) -> Iterator[dict[str, Any]]:
    held = found.memory
    for part, count in {**held.parts, "": held.total}.items():
        evidence = {held.evidence[part]: 1.0} if part else {}
        quantity = f"memory/{part}" if part else "memory"
        row = {"quantity": quantity, "value": float(count), "unit": "B", "kind": "planned"}
        yield {**row, "evidence": json.dumps(evidence)}
    if machine.memory_bytes is not None:
        yield {"quantity": "memory/device", "value": float(machine.memory_bytes), "unit": "B", "kind": "planned"}


def _banded(name: str, samples: Samples) -> dict[str, float]:
    found = band(samples)
    if name:
        return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
    return {"value": found.value, "low": found.low, "high": found.high}


def table(found: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows as a table with the columns of :data:`COLUMNS` and types that a missing value does not change."""
    frame = pd.DataFrame(list(found), columns=list(COLUMNS))
    counts = dict.fromkeys(("dp", "tp", "gpus", "sequence", "batch", "microbatches"), "Int64")
    numbers = dict.fromkeys(("value", "low", "high", "ratio", "ratio_low", "ratio_high"), "float64")
    return frame.astype({**counts, **numbers})
