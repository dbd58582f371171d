"""From settings to everything a run needs, checked before a process starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from impl.canzona.plan import Plan
from impl.errors import ConfigError
from impl.harness import data
from impl.harness.planning import plan_workload, workload
from impl.harness.spec import RunSpec
from impl.models import catalogue
from impl.models.catalogue import ModelConfig
from impl.optimizers.base import Optimizer, create
from impl.optimizers.routing import ELEMENTWISE, Route


@dataclass(frozen=True)
class Setup:
    """What settings decide, without a process group: the same on every rank.

    routes: one for every parameter, frozen ones too.
    optimizers: by name.
    report: the balance of the plan, with ``digest``.
    """

    model: ModelConfig
    routes: tuple[Route, ...]
    optimizers: dict[str, Optimizer]
    plan: Plan
    report: dict[str, Any]


def prepare(spec: RunSpec) -> Setup:
    """Return the setup of ``spec``; raises :class:`ConfigError` for anything in it that cannot work."""
    model = catalogue.load(spec.model, spec.layers)
    optimizers = create_optimizers(spec)
    load = workload(model, spec.optimizer, spec.tp, frozen=spec.frozen, rules=optimizers, options=spec.plan)
    planned = plan_workload(load, spec.strategy, spec.dp, spec.plan)
    return Setup(model, load.routes, optimizers, planned.plan, {"digest": planned.plan.digest, **planned.report})


def create_optimizers(spec: RunSpec) -> dict[str, Optimizer]:
    """Return the matrix optimizer and AdamW by name; raises :class:`ConfigError`."""
    if spec.optimizer != ELEMENTWISE:
        matrix = create(spec.optimizer, spec.optimizer_settings)
        return {spec.optimizer: matrix, ELEMENTWISE: create(ELEMENTWISE, spec.adamw_settings)}
    if spec.optimizer_settings and spec.adamw_settings:
        raise ConfigError("with optimizer adamw, give optimizer_settings or adamw_settings, not both")
    return {ELEMENTWISE: create(ELEMENTWISE, spec.optimizer_settings or spec.adamw_settings)}


def check(spec: RunSpec, *, local_ranks: int) -> Setup:
    """Return :func:`prepare`'s setup after checking data, initial weights and devices too.

    local_ranks: how many rank processes this machine will run.
    """
    setup = prepare(spec)
    longest = setup.model.arch.max_position_embeddings
    if spec.sequence > longest:
        raise ConfigError(f"sequence {spec.sequence} is longer than {spec.model}'s {longest} positions")
    device_type(spec.runtime.device, local_ranks)
    if spec.init_from is not None:
        from impl.models.hf_checkpoint import check_hf  # transformers is slow to import

        check_hf(spec.init_from, setup.model)
    vocabulary = setup.model.arch.vocab_size
    data.check(spec.data, sequence=spec.sequence, batch=spec.batch, dp=spec.dp, vocabulary=vocabulary)
    return setup


def device_type(wanted: str, local_ranks: int) -> str:
    """Return ``cpu`` or ``cuda``; ``auto`` is CUDA where there is any.

    Raises :class:`ConfigError` if this machine has fewer GPUs than ``local_ranks``: ranks never share one.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return "cpu"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < local_ranks:
        raise ConfigError(
            f"{local_ranks} ranks need {local_ranks} GPUs but this machine has {count}: use fewer ranks or "
            "--set runtime.device=cpu"
        )
    return "cuda"
