"""Checkpoints of which every rank reads back what it wrote (pipelines): safetensors files, nothing pickled.

A folder of :mod:`impl.harness.step_folders` holds ``rank-R.safetensors`` and ``rank-R.json`` for each rank.  Resuming
needs the same ranks and the same plan.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from impl.harness.record import CorruptRecord, write_atomically
from impl.harness.step_folders import draft_of, path_of, publish


@dataclass(frozen=True)
class Checkpoint:
    """One rank's part.

    spec, plan: digests of the settings and the plan that wrote it.
    data: state of the rank's token stream.
    """

    step: int
    spec: str
    plan: str
    data: dict[str, Any]
    tensors: dict[str, Tensor]


def save(folder: Path, part: Checkpoint, rank: int, group: dist.ProcessGroup) -> None:
    """Write ``part`` as this rank's; all ranks of ``group`` must call, and return when the checkpoint is complete."""
    draft = draft_of(folder, part.step)
    draft.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: t.detach().to("cpu", copy=True).contiguous() for k, t in part.tensors.items()},
        draft / f"rank-{rank}.safetensors",
    )
    with (draft / f"rank-{rank}.safetensors").open("rb") as file:
        os.fsync(file.fileno())
    meta = {"step": part.step, "spec": part.spec, "plan": part.plan, "data": part.data}
    write_atomically(draft / f"rank-{rank}.json", json.dumps(meta))
    dist.barrier(group=group)
    if rank == 0:
        publish(folder, part.step)
    dist.barrier(group=group)


def load(folder: Path, step: int, rank: int, *, spec: str, plan: str) -> Checkpoint:
    """Return this rank's part of the checkpoint of ``step``, in host memory.

    Raises :class:`CorruptRecord` if it cannot be read or was written under other settings or another plan.
    """
    path = path_of(folder, step)
    advice = f"delete {path} to resume from the one before"
    try:
        meta = json.loads((path / f"rank-{rank}.json").read_text())
        tensors = load_file(path / f"rank-{rank}.safetensors")
        part = Checkpoint(meta["step"], meta["spec"], meta["plan"], meta["data"], tensors)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CorruptRecord(f"checkpoint of step {step} cannot be read ({error}): {advice}") from None
    if part.step != step or part.spec != spec:
        raise CorruptRecord(f"checkpoint of step {step} was written under settings {part.spec[:12]}: {advice}")
    if part.plan != plan:
        raise CorruptRecord(
            f"checkpoint of step {step} has plan {part.plan[:12]} but this version of the code plans {plan[:12]}: "
            "resume with the version that wrote it"
        )
    return part
