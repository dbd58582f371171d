"""Plans of jobs for memory and time, each made once: runs that differ in seed, learning rate or steps share them."""

from __future__ import annotations

from functools import lru_cache

from impl.errors import ConfigError
from impl.harness import setup
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.setup import Setup
from impl.harness.spec import Frozen, RunSpec
from impl.optimizers.base import Optimizer
from impl.projection import memory, pipeline, pipeline_memory, training
from impl.projection.activations import boundary_bytes
from impl.projection.machine import BYTES, Machine
from impl.projection.pipeline_costs import Full, full, rows_of
from impl.projection.pipeline_memory import StageMemory
from impl.projection.timeline import Array
from impl.projection.uncertain import Samples
from impl.projection.workload import Workload
from impl.rotation.method import create_method

DTYPE = "float32"
"""Of a pipeline's weights and activations, as :mod:`impl.rotation.stage` has them."""
IN_NO_PLAN = (
    *("steps", "seed", "lr", "weight_decay", "clip", "reduction", "eval_every", "checkpoint_every", "init_from"),
    *("resume_from", "health_every", "max_skips", "schedule", "data", "runtime"),
)
"""Settings of a training run that neither its plan nor its workload depends on."""
IN_NO_SCHEDULE = (
    *("steps", "seed", "lr", "weight_decay", "eval_every", "checkpoint_every", "target", "schedule", "data", "process"),
)
"""Settings of a pipeline run that neither the bytes of a stage nor the time of an update depends on."""


class TrainingPlans:
    """Of the training runs that it is asked about: bytes of every rank and of a checkpoint, and the time of a step."""

    def __init__(self) -> None:
        self._setup = lru_cache(maxsize=None)(_prepared)
        self._parts = lru_cache(maxsize=None)(self._count)

    def parts(self, spec: RunSpec) -> dict[str, Array]:
        """Return the bytes ``[dp, tp]`` of each part of :func:`impl.projection.memory.by_rank`."""
        return self._parts(_key(spec, IN_NO_PLAN))

    def iteration(self, spec: RunSpec, machine: Machine) -> Samples:
        """Return the seconds ``[1 + DRAWS]`` of one step on ``machine``; raises :class:`ConfigError`."""
        made = self._setup(_key(spec, IN_NO_PLAN))
        return training.project(made.plan, costs(made), made.model, workload(spec), machine).iteration

    def checkpoint_bytes(self, spec: RunSpec) -> int:
        """Return the bytes of one checkpoint: fp32 masters and optimizer state, each once in its whole shape."""
        made = self._setup(_key(spec, IN_NO_PLAN))
        shapes = zip(made.plan.parameters, costs(made), strict=True)
        return sum(4 * parameter.numel + cost.state_bytes(parameter.shape) for parameter, cost in shapes)

    def _count(self, key: str) -> dict[str, Array]:
        made = self._setup(key)
        return memory.by_rank(made.plan, costs(made), made.model, workload(RunSpec.model_validate_json(key)))


class PipelinePlans:
    """Of the pipelines that it is asked about: bytes of every stage, and the time of an update."""

    def __init__(self) -> None:
        self._full = lru_cache(maxsize=None)(_filled)
        self._stages = lru_cache(maxsize=None)(self._memory)
        self._updates: dict[tuple[str, str], Samples] = {}

    def stages(self, spec: PipelineSpec) -> tuple[StageMemory, ...]:
        """Return the bytes of every stage of one replica; raises :class:`ConfigError` for what is not modelled."""
        return self._stages(_key(spec, IN_NO_SCHEDULE))

    def update(self, spec: PipelineSpec, machine: Machine) -> Samples:
        """Return the seconds ``[1 + DRAWS]`` of an update on ``machine``; of a simulation those of all stages in turn.

        Raises :class:`ConfigError` for what is not modelled.
        """
        key = _key(spec, IN_NO_SCHEDULE)
        if (key, machine.name) not in self._updates:
            known = self._full(key)
            found = pipeline.project(known.spec, machine, DTYPE, known=known)
            in_turn = (1.0 - found.bubble) * spec.stages * found.update_s
            self._updates[key, machine.name] = found.update_s if spec.runtime == "processes" else in_turn
        return self._updates[key, machine.name]

    def inputs(self, spec: PipelineSpec) -> int:
        """Return the bytes of the inputs of all microbatches that are on their way at one time, of all stages."""
        known = self._full(_key(spec, IN_NO_SCHEDULE))
        tokens = max(rows_of(known.spec, known.setup)) * spec.sequence
        each = boundary_bytes(known.setup.model.arch, tokens, BYTES[DTYPE])
        return round(each * sum(max(map(sum, flight.peaks), default=0) for flight in known.flights))

    def _memory(self, key: str) -> tuple[StageMemory, ...]:
        spec = PipelineSpec.model_validate_json(key)
        return pipeline_memory.memory(_of_one_replica(spec), DTYPE, known=self._full(key))


def like_pipedream(spec: PipelineSpec) -> PipelineSpec:
    """Return PipeDream with the schedule of ``spec``, whose own method is not modelled."""
    mode = spec.mode or create_method(spec.method, spec.method_settings).modes[0]
    return spec.model_copy(update={"method": "pipedream", "method_settings": {}, "mode": mode})


def workload(spec: RunSpec) -> Workload:
    """Return the projection's workload of a training run; the engine's model has no sequence parallelism."""
    given = {name: getattr(spec, name) for name in ("sequence", "batch", "microbatches", "dtype")}
    return Workload(**given, sequence_parallel=False)


def costs(made: Setup) -> list[Optimizer]:
    """Return the optimizer of each parameter of the plan."""
    optimizer_of = {slot.parameter: family.optimizer for family in made.plan.families for slot in family.slots}
    return [made.optimizers[optimizer_of[index]] for index in range(len(made.plan.parameters))]


def _key(spec: Frozen, names: tuple[str, ...]) -> str:
    """Return the settings of ``spec`` as JSON, those in ``names`` at their defaults."""
    fields = type(spec).model_fields
    neutral = {name: fields[name].get_default(call_default_factory=True) for name in names}
    return spec.model_copy(update=neutral).model_dump_json()


def _prepared(key: str) -> Setup:
    return setup.prepare(RunSpec.model_validate_json(key))


def _filled(key: str) -> Full:
    return full(_of_one_replica(PipelineSpec.model_validate_json(key)), DTYPE)


def _of_one_replica(spec: PipelineSpec) -> PipelineSpec:
    """Return the part of ``spec`` that one replica does; what replicas send each other is not modelled."""
    if spec.batch % spec.replicas:
        raise ConfigError(f"batch {spec.batch} is not a multiple of replicas ({spec.replicas}): change one of them")
    return spec.model_copy(update={"replicas": 1, "batch": spec.batch // spec.replicas})
