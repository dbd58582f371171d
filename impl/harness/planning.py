"""From names to a plan: the model's parameters, their optimizers, the plan and its balance."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from impl.canzona import balance
from impl.canzona.plan import Plan
from impl.canzona.strategies import PlanOptions, make_plan, registry
from impl.errors import ConfigError, unknown
from impl.models import logical
from impl.models.catalogue import ModelConfig
from impl.models.parameters import ParamSpec
from impl.optimizers.base import Optimizer, create
from impl.optimizers.routing import Route, route


@dataclass(frozen=True)
class Workload:
    """What is planned: the trainable parameters of a model on ``tp`` ranks, and the optimizer of each.

    routes: one for every parameter of the model, frozen ones too.
    """

    model: str
    optimizer: str
    tp: int
    parameters: tuple[ParamSpec, ...]
    costs: tuple[Optimizer, ...]
    routes: tuple[Route, ...]


@dataclass(frozen=True)
class Planned:
    """A plan with its balance report (JSON fields of ``impl plan``).

    costs: for each parameter of the plan its optimizer.
    """

    plan: Plan
    costs: tuple[Optimizer, ...]
    report: dict[str, Any]


def workload(
    config: ModelConfig,
    optimizer: str,
    tp: int,
    *,
    frozen: Sequence[str] = (),
    rules: Mapping[str, Optimizer] | None = None,
    options: PlanOptions | None = None,
) -> Workload:
    """Return the workload of ``config`` with ``optimizer`` for its matrices and AdamW for the rest.

    frozen: globs of parameters that are not trained; rules: the optimizers by name, by default with their defaults.
    options: decide whether fused matrices are split.

    Raises :class:`ConfigError` if ``tp`` does not fit the model, the optimizer is unknown or a glob matches nothing.
    """
    if tp < 1:
        raise ConfigError(f"--tp {tp}: give the number of tensor-parallel ranks, at least 1")
    parameters = config.parameters(tp)
    routes = route(parameters, optimizer, frozen)
    if rules is None:
        rules = {name: create(name) for name in {r.optimizer for r in routes} if name is not None}
    if options is not None and options.split != "none":
        heads = options.split_qkv == "heads"
        parameters = tuple(
            logical.split(p, config, heads=heads) if r.optimizer is not None and rules[r.optimizer].atomic else p
            for p, r in zip(parameters, routes, strict=True)
        )
    trained = [(p, rules[r.optimizer]) for p, r in zip(parameters, routes, strict=True) if r.optimizer is not None]
    return Workload(config.name, optimizer, tp, tuple(p for p, _ in trained), tuple(o for _, o in trained), routes)


def plan_workload(load: Workload, strategy: str, dp: int, options: PlanOptions) -> Planned:
    """Return the plan of ``strategy`` for ``dp`` ranks and its report; ``plan_seconds`` is the planning alone.

    Raises :class:`ConfigError` for an unknown strategy or ``dp`` below 1.
    """
    if dp < 1:
        raise ConfigError(f"--dp {dp}: give the number of data-parallel ranks, at least 1")
    known = registry()  # imports every planner before the clock starts
    if strategy not in known:
        raise unknown("strategy", strategy, known)
    start = time.perf_counter()
    plan = make_plan(strategy, load.parameters, load.costs, dp, load.tp, options)
    seconds = time.perf_counter() - start
    of = {spec.name: cost for spec, cost in zip(load.parameters, load.costs, strict=True)}
    costs = tuple(of[spec.module] for spec in plan.parameters)
    report = balance.report(plan, costs, seconds)
    return Planned(plan, costs, {"model": load.model, "optimizer": load.optimizer, **report})
