"""How long a job takes on a described device, projected from data sheets; its start and held-out losses left out."""

from __future__ import annotations

from functools import lru_cache

from impl.harness.job_plans import PipelinePlans, TrainingPlans
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.run import Run
from impl.harness.spec import RunSpec
from impl.harness.step_time_spec import StepTimeSpec
from impl.projection.hardware import Hardware, HardwareSpec
from impl.projection.machine import Roofline
from impl.projection.uncertain import Samples, exact


class JobTimes:
    """Projected seconds of jobs on devices of one kind, one rank a device."""

    def __init__(self, hardware: HardwareSpec, plans: TrainingPlans, pipelines: PipelinePlans) -> None:
        self._hardware, self._plans, self._pipelines = hardware, plans, pipelines
        self._machine = lru_cache(maxsize=None)(self._described)

    def seconds(self, run: Run) -> Samples:
        """Return the seconds ``[1 + DRAWS]`` of all steps of ``run``, of a timing job those of all its systems.

        Raises :class:`ConfigError` for what is not modelled.
        """
        spec = run.spec
        if isinstance(spec, PipelineSpec):
            return spec.steps * self._pipelines.update(spec, self._machine(spec.stages))
        if isinstance(spec, StepTimeSpec):
            each = (self.step(system.run_spec(spec.base)) for system in spec.systems)
            return steps_of_a_system(spec) * sum(each, exact(0.0))
        return spec.steps * self.step(spec)

    def step(self, spec: RunSpec) -> Samples:
        """Return the seconds ``[1 + DRAWS]`` of one training step."""
        return self._plans.iteration(spec, self._machine(spec.world_size))

    def _described(self, count: int) -> Roofline:
        return Roofline(Hardware(f"{self._hardware.id}x{count}", self._hardware, count))


def steps_of_a_system(spec: StepTimeSpec) -> int:
    """Return how many steps a timing job runs of each system: one that is audited, and those of its repetitions."""
    return 1 + (spec.warmup + spec.repetitions) * (1 + spec.timed_steps)
