"""The balance experiment: which plans it makes, and the table of how even they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import Field

from impl.canzona.strategies import PlanOptions
from impl.errors import ConfigError, unknown
from impl.harness.optimizer_files import OptimizerEntry, with_optimizers
from impl.harness.planning import Workload, plan_workload, workload
from impl.harness.spec import Frozen, load_yaml, parse
from impl.harness.step_time_spec import System
from impl.harness.tiers import TIERS, Tier
from impl.models import catalogue
from impl.optimizers.base import create
from impl.optimizers.routing import ELEMENTWISE

RATIOS = (
    "flops_ratio",
    "flops_ratio_tp_local",
    "memory_ratio",
    "per_gpu_flops_ratio",
    "lower_bound_dp",
    "lower_bound_gpu",
    "comm_ratio",
    "padding",
    "all_elements_ratio",
    "all_memory_ratio",
)
OPTIONS = ("bucket_elements", "alpha", "cost", "tp_mode", "capacity_bytes", "fallback")
COLUMNS = (
    *("sweep", "model", "model_name", "optimizer", "system", "system_name", "strategy", "nv_version", "dp", "tp"),
    *OPTIONS,
    *RATIOS,
    *("matrices", "micro_groups", "over_capacity", "idle_ranks", "fallback_used", "plan_seconds"),
    *("status", "reason", "kind"),
)
"""Columns of the table; ratios are largest over mean, sizes in elements or bytes, ``plan_seconds`` is measured."""


class Meshes(Frozen):
    """Every combination of these numbers of ranks."""

    dp: tuple[int, ...] = Field(min_length=1)
    tp: tuple[int, ...] = Field(min_length=1)


class Point(Frozen):
    """The one model and mesh at which settings are swept."""

    model: str
    dp: int = Field(gt=0)
    tp: int = Field(gt=0)


class CapacitySweep(Frozen):
    """Micro-group capacities in bytes under several modes, at the point's model and TP and these DP sizes."""

    bytes: tuple[int, ...]
    modes: tuple[str, ...]
    dp: tuple[int, ...]


class CostSweep(Frozen):
    """Cost models under Canzona, at the point's mesh."""

    models: tuple[str, ...]
    costs: tuple[str, ...]


class BalanceTier(Frozen):
    """What is planned on one tier: all models on all meshes under all systems, and Canzona's sweeps.

    alpha: values of the alpha sweep, planned without fallback.
    """

    models: tuple[str, ...] = Field(min_length=1)
    meshes: Meshes
    point: Point
    alpha: tuple[float, ...]
    capacity: CapacitySweep
    cost: CostSweep


class BalanceSpec(Frozen):
    """The experiment's file.

    optimizer: of all plans but those for ``optimizers``, which are planned on the point's mesh only.
    options: planner settings that all plans share.
    """

    title: str
    optimizer: str
    optimizers: tuple[OptimizerEntry, ...] = ()
    options: dict[str, Any]
    systems: tuple[System, ...] = Field(min_length=1)
    tiers: dict[Tier, BalanceTier]

    def tier(self, name: str) -> BalanceTier:
        """Return one tier; raises :class:`ConfigError` for an unknown or missing one."""
        if name not in TIERS:
            raise unknown("tier", name, TIERS)
        found = {str(t): spec for t, spec in self.tiers.items()}
        if name not in found:
            raise ConfigError(f"this experiment has no tier {name!r}; it has {', '.join(found)}")
        return found[name]

    def cases(self, tier: str) -> Iterator[Case]:
        """Return every plan of ``tier``; raises :class:`ConfigError` for a wrong setting of the planner."""
        t = self.tier(tier)

        def case(sweep: str, model: str, dp: int, tp: int, system: System, **settings: Any) -> Case:
            version = {"nv_version": system.nv_version} if system.nv_version else {}
            return Case(sweep, model, dp, tp, system, parse(PlanOptions, {**self.options, **version, **settings}))

        for model in t.models:
            for tp in t.meshes.tp:
                for dp in t.meshes.dp:
                    yield from (case("mesh", model, dp, tp, system) for system in self.systems)
        canzona = System(id="canzona", name="Canzona", strategy="canzona")
        p = t.point
        for alpha in t.alpha:
            yield case("alpha", p.model, p.dp, p.tp, canzona, alpha=alpha, fallback=False)
        for dp in t.capacity.dp:
            for mode in t.capacity.modes:
                for size in t.capacity.bytes:
                    yield case("capacity", p.model, dp, p.tp, canzona, tp_mode=mode, capacity_bytes=size)
        for model in t.cost.models:
            for cost in t.cost.costs:
                yield case("cost", model, p.dp, p.tp, canzona, cost=cost)
        for entry in self.optimizers:
            for model in t.models:
                for system in self.systems:
                    yield replace(case("optimizer", model, p.dp, p.tp, system), optimizer=entry)


@dataclass(frozen=True)
class Case:
    """One plan of the experiment; ``sweep`` says which question it belongs to.

    optimizer: of the matrices, None for the experiment's.
    """

    sweep: str
    model: str
    dp: int
    tp: int
    system: System
    options: PlanOptions
    optimizer: OptimizerEntry | None = None

    def keys(self, optimizer: str) -> dict[str, Any]:
        """Return the columns that say what was planned, ``optimizer`` being the experiment's."""
        nv = self.system.strategy == "nv-layerwise"
        return {
            "sweep": self.sweep,
            "model": self.model,
            "optimizer": self.optimizer.id if self.optimizer else optimizer,
            "system": self.system.id,
            "system_name": self.system.name,
            "strategy": self.system.strategy,
            "nv_version": self.options.nv_version if nv else None,
            "dp": self.dp,
            "tp": self.tp,
            **{name: getattr(self.options, name) for name in OPTIONS},
            "bucket_elements": self.options.bucket_size(self.dp),
            "kind": "planned",
        }


def load(path: str | Path) -> BalanceSpec:
    """Return the experiment of a YAML file; raises :class:`ConfigError` that names the file and the setting."""
    try:
        return parse(BalanceSpec, with_optimizers(Path(path), load_yaml(path)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def rows(spec: BalanceSpec, tier: str) -> Iterator[dict[str, Any]]:
    """Yield one row of the table per plan.

    A model that the TP degree does not divide gives a row with status ``skipped`` and the reason, and no numbers.
    """

    @lru_cache(maxsize=1)
    def load_workload(model: str, tp: int, optimizer: str) -> Workload:
        rules = {optimizer: create(optimizer, settings.get(optimizer)), ELEMENTWISE: create(ELEMENTWISE)}
        return workload(catalogue.load(model), optimizer, tp, rules=rules)

    @lru_cache(maxsize=1)
    def misfit(model: str, tp: int) -> str | None:
        try:
            catalogue.load(model).check(tp)
        except ConfigError as error:
            return str(error)
        return None

    settings = {entry.id: entry.settings for entry in spec.optimizers}
    cases = list(spec.cases(tier))
    names = {model: catalogue.load(model).display_name for model in {c.model for c in cases}}
    for case in cases:
        keys = {**case.keys(spec.optimizer), "model_name": names[case.model]}
        if reason := misfit(case.model, case.tp):
            yield {**keys, "status": "skipped", "reason": reason}
            continue
        load = load_workload(case.model, case.tp, keys["optimizer"])
        report = plan_workload(load, case.system.strategy, case.dp, case.options).report
        yield {**keys, **_numbers(report), "status": "done"}


def _numbers(report: dict[str, Any]) -> dict[str, Any]:
    """Return the numeric columns of one report."""
    flat = {
        **report,
        "lower_bound_dp": (report["lower_bound"] or {}).get("dp"),
        "lower_bound_gpu": (report["lower_bound"] or {}).get("gpu"),
        "all_elements_ratio": report["all_parameters"]["elements_ratio"],
        "all_memory_ratio": report["all_parameters"]["memory_ratio"],
        "over_capacity": len(report["over_capacity"]),
    }
    whole = ("matrices", "micro_groups", "over_capacity", "idle_ranks", "fallback_used", "plan_seconds")
    return {name: flat[name] for name in (*RATIOS, *whole)}


def table(found: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows as a table with the columns of :data:`COLUMNS` and types that a missing value does not change."""
    frame = pd.DataFrame(found, columns=list(COLUMNS))
    counts = [
        "dp",
        "tp",
        "bucket_elements",
        "capacity_bytes",
        "matrices",
        "micro_groups",
        "over_capacity",
        "idle_ranks",
    ]
    kinds: dict[str, str] = dict.fromkeys(counts, "Int64")
    kinds |= dict.fromkeys((*RATIOS, "alpha", "plan_seconds"), "float64")
    kinds |= dict.fromkeys(("fallback", "fallback_used"), "boolean")
    return frame.astype(kinds)
