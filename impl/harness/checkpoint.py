"""Checkpoints of a run: every rank its own safetensors file, whole step folders only, nothing pickled.

``checkpoint/step-000020/`` holds ``rank-R.safetensors`` and ``rank-R.json`` for each rank; ``checkpoint/latest`` names
the newest folder.  A folder gets its name only when all ranks have written, so every one that exists is complete.
Resuming needs the same mesh and plan.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from impl.harness.record import CorruptRecord, sync_folder, write_atomically

KEPT = 2
"""Older checkpoints are deleted."""
_STEP = re.compile(r"step-(\d{6,})")


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
    final = folder / f"step-{part.step:06d}"
    draft = final.with_name(final.name + ".tmp")
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
        if final.exists():
            shutil.rmtree(final)
        draft.rename(final)
        sync_folder(folder)
        write_atomically(folder / "latest", final.name + "\n")
        for old in steps(folder)[:-KEPT]:
            shutil.rmtree(folder / f"step-{old:06d}")
    dist.barrier(group=group)


def steps(folder: Path) -> list[int]:
    """Return the steps of all complete checkpoints, rising."""
    if not folder.is_dir():
        return []
    return sorted(int(m[1]) for p in folder.iterdir() if (m := _STEP.fullmatch(p.name)))


def latest(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint, None if there is none.

    A crash between naming a folder and updating ``latest`` leaves a newer whole folder, which counts.
    """
    return max(steps(folder), default=None)


def load(folder: Path, step: int, rank: int, *, spec: str, plan: str) -> Checkpoint:
    """Return this rank's part of the checkpoint of ``step``, in host memory.

    Raises :class:`CorruptRecord` if it cannot be read or was written under other settings or another plan.
    """
    path = folder / f"step-{step:06d}"
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
