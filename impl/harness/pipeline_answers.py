"""What a pipeline needs and how fast it is on a described machine: one answer, and those of an experiment."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from impl.errors import ConfigError
from impl.harness.pipeline_projection_spec import CaseEntry, Cell, MethodEntry, PipelineProjectionSpec, Policy
from impl.harness.pipeline_spec import PipelineSpec
from impl.models import catalogue
from impl.projection import hardware, pipeline, pipeline_memory, uncertain
from impl.projection.machine import Machine
from impl.projection.measured import load_machine
from impl.projection.pipeline import PipelineProjection
from impl.projection.pipeline_costs import full
from impl.projection.pipeline_memory import StageMemory
from impl.projection.uncertain import Samples
from impl.rotation.method import create_method


def machine(name: str, stages: int, kernels: Path | None = None) -> Machine:
    """Return the machine ``name``, known by its data sheets and, as far as there are any, measured ``kernels``.

    Raises :class:`ConfigError` if it has fewer than ``stages`` devices.
    """
    if name != hardware.LOCAL:
        kind, count = hardware.split(name)
        if stages > count:
            raise ConfigError(f"{stages} stages need {stages} devices: {name} has {count}, write {kind}x{stages}")
    return load_machine(name, kernels, stages, pipeline=True)


@dataclass(frozen=True)
class Answer:
    """What is known of one cell; ``projection`` is None if it does not fit into ``limit`` bytes a device."""

    microbatches: int
    limit: int | None
    memory: tuple[StageMemory, ...]
    misfit: str | None
    projection: PipelineProjection | None

    @property
    def fullest(self) -> StageMemory:
        """The stage with the most bytes."""
        return max(self.memory, key=lambda stage: stage.total)


def answer(spec: PipelineSpec, on: Machine, dtype: str, *, capacity_bytes: int) -> Answer:
    """Return memory and, where that suffices, times of ``spec`` on a machine."""
    known = full(spec, dtype)
    stages = pipeline_memory.memory(spec, dtype, capacity_bytes=capacity_bytes, known=known)
    misfit = pipeline_memory.misfit(stages, on.memory_bytes)
    projection = None if misfit else pipeline.project(spec, on, dtype, known=known)
    return Answer(known.setup.microbatches, on.memory_bytes, stages, misfit, projection)


@dataclass
class PipelineGrid:
    """The answers of an experiment, each computed once, when it is asked for."""

    spec: PipelineProjectionSpec
    _machines: dict[str, Machine] = field(default_factory=dict)
    _answers: dict[Cell, Answer] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _references: dict[str, PipelineProjection | None] = field(default_factory=dict)

    def model_name(self, model: str) -> str:
        """Return how a model is displayed."""
        if model not in self._names:
            self._names[model] = catalogue.load(model).display_name
        return self._names[model]

    def case(self, name: str) -> CaseEntry:
        """Return a case by its id."""
        return next(case for case in self.spec.cases if case.id == name)

    def parts(self, cell: Cell) -> tuple[CaseEntry, MethodEntry, Policy]:
        """Return what the ids of ``cell`` stand for."""
        method = next(m for m in self.spec.methods if m.id == cell.method)
        return self.case(cell.case), method, next(p for p in self.spec.policies if p.id == cell.policy)

    def cells(self, case: CaseEntry) -> Iterator[Cell]:
        """Yield the cells of a case; a stash in host memory makes sense only where there is a stash."""
        for policy in self.spec.policies:
            for method in self.spec.methods:
                chosen = (not case.methods or method.id in case.methods) and (
                    not case.policies or policy.id in case.policies
                )
                cell = Cell(case=case.id, method=method.id, policy=policy.id)
                if chosen and self._sensible(cell):
                    yield cell

    def answer(self, cell: Cell) -> Answer:
        """Return the answer of ``cell``."""
        if cell not in self._answers:
            case = self.case(cell.case)
            if case.hardware not in self._machines:
                self._machines[case.hardware] = machine(case.hardware, case.stages)
            on = self._machines[case.hardware]
            spec = self.spec.run(*self.parts(cell))
            self._answers[cell] = answer(spec, on, case.dtype, capacity_bytes=self.spec.capacity_bytes)
        return self._answers[cell]

    def ratio(self, cell: Cell) -> Samples | None:
        """Return the time of an update over that of :meth:`reference`, None where one of the two does not fit."""
        own, base = self.answer(cell).projection, self.reference(cell.case)
        return own.update_s / base.update_s if own and base else None

    def reference(self, case: str) -> PipelineProjection | None:
        """Return the reference method under that of the case's policies with which it is fastest, None if none fits."""
        if case not in self._references:
            chosen = self.case(case).policies
            cells = [
                Cell(case=case, method=self.spec.reference, policy=policy.id)
                for policy in self.spec.policies
                if not chosen or policy.id in chosen
            ]
            found = [self.answer(cell).projection for cell in cells if self._sensible(cell)]
            fitting = [projection for projection in found if projection is not None]
            self._references[case] = min(fitting, key=lambda own: float(own.update_s[0]), default=None)
        return self._references[case]

    def _sensible(self, cell: Cell) -> bool:
        """Return whether there is a stash to put into host memory where that is asked for."""
        _, method, policy = self.parts(cell)
        return not policy.stash_on_cpu or create_method(method.method, method.settings).modes[0] != "sync"


def summary(spec: PipelineSpec, on: Machine, dtype: str, *, capacity_bytes: int) -> dict[str, Any]:
    """Return everything about one pipeline on one machine as plain JSON data; without times if it does not fit.

    ``ratio_to_pipedream`` is to PipeDream with the same settings; ``ratio_reason`` says why there is none.
    """
    found = answer(spec, on, dtype, capacity_bytes=capacity_bytes)
    plain = spec.model_copy(update={"method": "pipedream", "method_settings": {}, "mode": None})
    own = found.projection
    base = answer(plain, on, dtype, capacity_bytes=capacity_bytes) if own else None
    no_ratio = f"PipeDream with these settings does not fit: {base.misfit}" if base and base.misfit else found.misfit
    bands = {
        "samples_per_s": own and own.samples_per_s,
        "update_s": own and own.update_s,
        "bubble": own and own.bubble,
        "exposed_communication_s": own and own.exposed_s,
        "gradient_norm_share": own and own.norm_share,
        "ratio_to_pipedream": own and base and base.projection and own.update_s / base.projection.update_s,
    }
    known = {name: uncertain.band(samples) for name, samples in bands.items() if samples is not None}
    return {
        "model": catalogue.load(spec.model, spec.layers).display_name,
        **{name: getattr(spec, name) for name in ("method", "stages", "batch", "sequence", "recompute")},
        **{"dtype": dtype, "hardware": on.name, "kind": "projected"},
        "fits": found.misfit is None,
        "reason": found.misfit,
        **{name: known[name].value if name in known else None for name in bands},
        "ratio_reason": no_ratio,
        "band": {name: [band.low, band.high] for name, band in known.items()},
        "memory_bytes": [{**stage.parts(), "total": stage.total, "host": stage.host} for stage in found.memory],
        "memory_kind": "planned",
        "evidence": own.evidence if own else {},
    }
