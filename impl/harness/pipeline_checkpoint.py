"""Checkpoints of a pipeline run, drained or with microbatches in flight, see :mod:`impl.harness.rank_checkpoint`.

A checkpoint is taken by every stage right after the same update: a cut through the schedule that depends on nothing
else.  Hidden states that are on their way between two stages there are computed again by their sender.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.harness import rank_checkpoint, step_folders
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.rank_checkpoint import Checkpoint
from impl.harness.record import CorruptRecord, RunFolder
from impl.rotation import resume
from impl.rotation.schedule import Schedule
from impl.rotation.simulator import Microbatches
from impl.rotation.stage import Stage

BATCH = "batch"
"""Name of the tensor with the batch that is being cut into microbatches."""


def schedule_digest(schedule: Schedule) -> str:
    """Return the SHA-256 of every action of ``schedule``."""
    return hashlib.sha256(json.dumps(dataclasses.astuple(schedule)).encode()).hexdigest()


class Checkpoints:
    """Writes and reads the part of a run's checkpoints that this process has; all processes must call.

    stages: of this process, in the order of their numbers.
    microbatches: None in a process whose stage reads no tokens.
    """

    def __init__(
        self, spec: PipelineSpec, run: RunFolder, stages: Sequence[Stage], microbatches: Microbatches | None
    ) -> None:
        self._every, self._last, self._digest = spec.checkpoint_every, spec.steps, spec.digest
        self._folder, self._stages, self._microbatches = run.checkpoints, stages, microbatches
        self._schedule = schedule_digest(stages[0].schedule)

    def due(self, update: int) -> bool:
        """Return whether there is a checkpoint after 1-based ``update``."""
        return self._every > 0 and update % self._every == 0 and update < self._last

    def save(self, update: int) -> None:
        """Write the checkpoint after 1-based ``update``, which every stage of this process has just done."""
        data: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        if self._microbatches is not None:
            data["microbatches"], tensors[BATCH] = self._microbatches.state_dict()
        for stage in self._stages:
            tensors |= {f"stage-{stage.index}/{key}": t for key, t in resume.state_dict(stage).items()}
        part = Checkpoint(update, self._digest, self._schedule, data, tensors)
        rank_checkpoint.save(self._folder, part, dist.get_rank(), _world())

    def load(self, update: int) -> None:
        """Let the stages, which must be fresh, go on after ``update``.

        Raises :class:`CorruptRecord` if the checkpoint cannot be read or is not of this run.
        """
        part = rank_checkpoint.load(self._folder, update, dist.get_rank(), spec=self._digest, plan=self._schedule)
        try:
            for stage in self._stages:
                start = f"stage-{stage.index}/"
                own = {key.removeprefix(start): t for key, t in part.tensors.items() if key.startswith(start)}
                resume.load_state_dict(stage, own)
            if self._microbatches is not None:
                self._microbatches.load_state_dict(part.data["microbatches"], part.tensors[BATCH])
        except KeyError as error:
            raise CorruptRecord(f"checkpoint of update {update} is not of these stages: {error}") from None


def newest(run: RunFolder) -> int:
    """Return the update of the newest complete checkpoint of ``run``, 0 if there is none."""
    return step_folders.latest(run.checkpoints) or 0


def agreed(update: int, device: torch.device) -> int:
    """Return rank 0's ``update`` on every rank: file systems of other machines may lag behind."""
    shared = torch.tensor([update], device=device)
    dist.broadcast(shared, 0)
    return int(shared)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "a run has a default process group"
    return world
