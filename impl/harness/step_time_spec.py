"""The systems that are compared, and the settings of a timing job."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from impl.harness.spec import Frozen, RunSpec, parse
from impl.harness.tiers import Label, canonical_digest, merged, no_duplicates


class System(Label):
    """One of the systems that an experiment compares.

    nv_version: which published version of NV-layerwise.
    live: run megatron-core's own ``LayerWiseDistributedOptimizer`` instead of this project's engine.
    """

    strategy: str
    nv_version: Literal["ping-pong", "lpt-numel", "lpt-ns"] | None = None
    live: bool = False

    def run_spec(self, base: RunSpec) -> RunSpec:
        """Return ``base`` with this system's strategy and version."""
        plan = {} if self.nv_version is None else {"plan": {"nv_version": self.nv_version}}
        return parse(RunSpec, merged(base.resolved(), {"strategy": self.strategy}, plan))


class StepTimeSpec(Frozen):
    """One interleaved timing job: every system in the same process group, one after the other in each repetition.

    base: the run that all systems share; its ``strategy`` and ``plan.nv_version`` are replaced by each system's.
    repetitions: of every system; warmup: untimed repetitions before them.
    timed_steps: per repetition, whose mean is its time: as many as the longest period of an optimizer, so that each
        repetition has the same work.
    compare_parameters: record a digest of every system's parameters after the last step.
    """

    base: RunSpec
    systems: tuple[System, ...] = Field(min_length=1)
    repetitions: int = Field(default=20, gt=0)
    warmup: int = Field(default=3, ge=0)
    timed_steps: int = Field(default=1, gt=0)
    compare_parameters: bool = False

    @model_validator(mode="after")
    def _distinct(self) -> StepTimeSpec:
        no_duplicates(self.systems)
        return self

    @property
    def world_size(self) -> int:
        """Number of rank processes."""
        return self.base.world_size

    def resolved(self) -> dict[str, Any]:
        """Return every setting as plain data, defaults included."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """SHA-256 of the settings; independent of key order."""
        data = self.resolved() | {"base": self.base.digest}
        for name in ("timed_steps", "compare_parameters"):  # added later: jobs without them keep their names
            if data[name] == type(self).model_fields[name].default:
                del data[name]
        return canonical_digest(data)
