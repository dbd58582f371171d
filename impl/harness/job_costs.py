"""What a job costs before it runs: bytes on its fullest rank (planned), seconds (projected), bytes on disk (planned).

Only what is asked of a described device imports the planners.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from impl.errors import ConfigError
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.run import Run
from impl.harness.spec import RunSpec
from impl.harness.step_folders import KEPT
from impl.harness.step_time_spec import StepTimeSpec

if TYPE_CHECKING:
    from impl.harness.job_memory import Need
    from impl.projection.hardware import HardwareSpec
    from impl.projection.uncertain import Band

DEFAULT_HARDWARE = {"gpu1": "h100", "node8": "a100-80", "cluster": "h100"}
"""On what the jobs of a tier must fit, unless another is named; the other tiers run on a CPU."""
MANIFEST_BYTES = 13_000
LOG_BYTES = 2_000
ROW_BYTES = {"train": 700, "step-time": 530, "pipeline": 115}
"""Of a manifest, of the log of a rank, of a row of metrics: rounded up from runs of the tier ``laptop``."""
VERSION_BYTES = 50
"""What a pipeline's record of versions takes for each update and stage, from the same runs."""


@dataclass(frozen=True)
class Disk:
    """Bytes that a run leaves on disk.

    checkpoints: those that are kept; while one is written there is one more.  records: metrics, manifest, logs.
    """

    checkpoints: int
    records: int
    rests_on: str = "planned: shapes of what a checkpoint holds; sizes of rows as in runs of the tier laptop"

    @property
    def total(self) -> int:
        """All of them."""
        return self.checkpoints + self.records


@dataclass(frozen=True)
class JobCost:
    """What one job costs on a kind of device.

    ranks: processes, one a device.  need: bytes of the fullest one (planned).
    seconds: projected, with their band; None where ``unknown`` says why.
    misfit: the line that says why the job cannot run on this device, None if it fits.
    """

    ranks: int
    need: Need
    seconds: Band | None
    unknown: str
    disk: Disk
    misfit: str | None


class JobCosts:
    """The costs of jobs on devices of one kind; what several jobs share is planned once."""

    def __init__(self, hardware: HardwareSpec) -> None:
        from impl.harness.job_plans import PipelinePlans, TrainingPlans
        from impl.harness.job_times import JobTimes

        self._hardware, self._plans, self._pipelines = hardware, TrainingPlans(), PipelinePlans()
        self._times = JobTimes(hardware, self._plans, self._pipelines)

    def of(self, run: Run) -> JobCost:
        """Return what ``run`` costs; raises :class:`ConfigError` for settings that cannot work."""
        from impl.projection.uncertain import band

        need, misfit, unknown, seconds = self.need(run), self.misfit(run), "", None
        if misfit is not None:
            unknown = "does not fit"
        else:
            try:
                seconds = band(self._times.seconds(run))
            except ConfigError as error:
                unknown = str(error)
        return JobCost(run.spec.world_size, need, seconds, unknown, self.disk(run), misfit)

    def need(self, run: Run) -> Need:
        """Return the bytes of the fullest process of ``run``."""
        from impl.harness import job_memory

        if isinstance(run.spec, PipelineSpec):
            return job_memory.of_pipeline(run.spec, self._pipelines)
        return job_memory.of_training(_systems(run), self._plans)

    def misfit(self, run: Run) -> str | None:
        """Return why ``run`` does not fit a device's memory and what to do, None if it fits."""
        need, have = self.need(run), self._hardware.device.memory_bytes
        if need.total <= have:
            return None
        about = ", ".join((_model(run), *([run.system.name] if run.system else [])))
        device = f"{self._hardware.display_name} has {have / 1e9:.1f} GB"
        return (
            f"{run.command} {run.name} ({about}): needs {need.total / 1e9:.1f} GB on {need.where}, {device}: "
            f"{self._advice(run, have)}"
        )

    def disk(self, run: Run) -> Disk:
        """Return the bytes that ``run`` leaves on disk."""
        from impl.harness import job_memory

        spec, kept, one = run.spec, checkpoints_kept(run), 0
        if isinstance(spec, RunSpec) and kept:
            one = self._plans.checkpoint_bytes(spec)
        elif isinstance(spec, PipelineSpec) and kept:
            one = job_memory.stored(spec, self._pipelines)
        return Disk(kept * one, record_bytes(run))

    def _advice(self, run: Run, have: int) -> str:
        if isinstance(run.spec, PipelineSpec):
            return self._pipeline_advice(run, run.spec, have)
        from impl.harness import job_memory

        systems = _systems(run)
        alone = {name: job_memory.of_training([(name, spec)], self._plans).total for name, spec in systems}
        if large := {name: total for name, total in alone.items() if total > have}:
            named = ", ".join(f"{name} (alone {total / 1e9:.1f} GB)" for name, total in large.items())
            if len(systems) == 1:
                return "give more microbatches, a larger mesh, or leave it out"
            return f"leave {named} out (without), or take a larger mesh"
        return "give more microbatches, or pairs_with, so that fewer systems live side by side"

    def _pipeline_advice(self, run: Run, spec: PipelineSpec, have: int) -> str:
        for change in ({"recompute": "stage"}, {"recompute": "stage", "stash_on_cpu": True}):
            other = run.model_copy(update={"spec": spec.model_copy(update=change)})
            if (total := self.need(other).total) <= have:
                words = ", ".join(f"{name}: {str(value).lower()}" for name, value in change.items())
                return f"{total / 1e9:.1f} GB with {words}"
        return "take more stages, smaller microbatches, another method or a larger device"


def misfit(run: Run, hardware: HardwareSpec) -> str | None:
    """Return why ``run`` does not fit the memory of ``hardware`` and what to do, None if it fits.

    For many runs use one :class:`JobCosts`.
    """
    return JobCosts(hardware).misfit(run)


def checkpoints_kept(run: Run) -> int:
    """Return how many checkpoints a finished ``run`` leaves; a timing job writes none."""
    spec = run.spec
    if isinstance(spec, StepTimeSpec) or not spec.checkpoint_every:
        return 0
    last = spec.steps - 1 if isinstance(spec, PipelineSpec) else spec.steps  # a pipeline's last update has none
    return min(KEPT, last // spec.checkpoint_every)


def record_bytes(run: Run) -> int:
    """Return the bytes of metrics, manifest and logs of ``run``."""
    spec = run.spec
    rows, other = 0, MANIFEST_BYTES + LOG_BYTES * spec.world_size
    if isinstance(spec, StepTimeSpec):
        rows = spec.repetitions * len(spec.systems)
    else:
        rows = spec.steps + (spec.steps // spec.eval_every if spec.eval_every else 0)
    if isinstance(spec, PipelineSpec):
        other += VERSION_BYTES * spec.steps * spec.stages * (spec.microbatches or 1)
    return other + ROW_BYTES[run.command] * rows


def _systems(run: Run) -> list[tuple[str, RunSpec]]:
    spec = run.spec
    if isinstance(spec, StepTimeSpec):
        return [(system.id, system.run_spec(spec.base)) for system in spec.systems]
    assert isinstance(spec, RunSpec)
    return [(run.system.id if run.system else spec.strategy, spec)]


def _model(run: Run) -> str:
    return run.spec.model if isinstance(run.spec, PipelineSpec) else run.base.model
