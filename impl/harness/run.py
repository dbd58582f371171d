"""One run of an experiment."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.spec import Frozen, RunSpec
from impl.harness.step_time_spec import StepTimeSpec
from impl.harness.tiers import Id, Label


class Run(Frozen):
    """One run of an experiment.

    name: what it is, in path characters; command: the subcommand of ``python -m impl`` that executes it.
    system: what is compared with others here, None when one job runs several.
    """

    name: Id
    command: Literal["train", "step-time", "pipeline"]
    spec: RunSpec | StepTimeSpec | PipelineSpec
    system: Label | None = None

    @property
    def id(self) -> str:
        """Name and the first eight digits of the settings' hash: the name of the run's folder."""
        return f"{self.name}-{self.spec.digest[:8]}"

    def place(self, results: Path, experiment: str) -> Path:
        """Return the run's folder below a tier's ``results``: those of pipelines are shared between experiments."""
        return results / ("pipelines" if self.command == "pipeline" else experiment) / "runs" / self.id

    @property
    def base(self) -> RunSpec:
        """The settings of the training run, shared by all systems of a step-time job; a pipeline has none."""
        base = self.spec.base if isinstance(self.spec, StepTimeSpec) else self.spec
        assert isinstance(base, RunSpec)
        return base
