"""The settings of a pipeline run, validated before any process starts."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field, model_validator

from impl.harness.spec import DataSpec, Frozen, RuntimeSpec, ScheduleSpec
from impl.rotation.schedule import Mode


class PipelineSpec(Frozen):
    """One pipeline run.

    method: name of a :class:`impl.rotation.method.Method`; method_settings: its own settings.
    stages: pipeline stages P, one process each with ``runtime`` ``processes``; ``simulator`` computes the same numbers
        in one process.
    layer_counts: layers of each stage; None deals them evenly.
    mode: which weights forward and backward see; None is the method's first.
    drain_every: drain the pipeline after every so many updates, where delays begin anew; 0 is at the end only.
    microbatches: into which an update's ``batch`` sequences are cut; None is 1 for asynchronous schedules, else P.
    clip: limit of the gradient norm **of each stage**, 0 for none.
    replicas: processes of each stage that share an update's sequences (``processes`` only).
    recompute: what backward computes again: ``none``, ``stage`` (all but a stage's input), ``selective-attention``.
    stash_on_cpu: keep stashed weights in CPU memory; with ``recompute: stage``.
    checkpoint_every: write a checkpoint after every so many updates, with the microbatches in flight; 0 for never.
        Changes no number.
    target: held-out loss for ``iterations_to_target``.
    process: how rank processes execute; changes no number except by ``deterministic`` and ``device``.
    """

    model: str
    method: str = "basis-rotation"
    method_settings: dict[str, Any] = Field(default_factory=dict)
    stages: int = Field(default=1, gt=0)
    layers: int | None = Field(default=None, gt=0)
    layer_counts: tuple[int, ...] | None = None
    runtime: Literal["simulator", "processes"] = "simulator"
    mode: Mode | None = None
    drain_every: int = Field(default=0, ge=0)
    recompute: Literal["none", "stage", "selective-attention"] = "none"
    stash_on_cpu: bool = False
    replicas: int = Field(default=1, gt=0)
    steps: int = Field(default=400, gt=0)
    seed: int = Field(default=0, ge=0)
    batch: int = Field(default=16, gt=0)
    sequence: int = Field(default=48, gt=0)
    microbatches: int | None = Field(default=None, gt=0)
    lr: float = Field(default=4e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    clip: float = Field(default=1.0, ge=0)
    eval_every: int = Field(default=20, ge=0)
    checkpoint_every: int = Field(default=0, ge=0)
    target: float | None = Field(default=None, allow_inf_nan=False)
    schedule: ScheduleSpec = ScheduleSpec()
    data: DataSpec = DataSpec()
    process: RuntimeSpec = RuntimeSpec()

    @model_validator(mode="after")
    def _counts(self) -> PipelineSpec:
        if self.layer_counts is not None and len(self.layer_counts) != self.stages:
            raise ValueError(f"layer_counts has {len(self.layer_counts)} numbers for {self.stages} stages")
        return self

    @property
    def world_size(self) -> int:
        """Number of rank processes, 1 for the simulator."""
        return self.stages * self.replicas if self.runtime == "processes" else 1

    def resolved(self) -> dict[str, Any]:
        """Return every setting as plain data, defaults included."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """SHA-256 of the settings that decide the result: independent of key order, timings excluded."""
        data = self.resolved()
        del data["checkpoint_every"]
        if not data["drain_every"]:  # added later: runs that do not use it keep the names they had
            del data["drain_every"]
        data["process"] = {k: data["process"][k] for k in ("device", "deterministic", "threads")}
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
