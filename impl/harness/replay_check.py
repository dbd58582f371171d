"""Real optimizer steps and their rank replay in one job, in turns, so that both see the same noise of the machine."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from impl.canzona.mesh import Mesh
from impl.errors import ConfigError
from impl.harness import launch
from impl.harness.record import RunFolder, append_row, read_rows
from impl.harness.setup import device_type
from impl.harness.step_time import check_systems, contestant, slowest
from impl.harness.step_time_spec import StepTimeSpec
from impl.harness.worker import Rank
from impl.projection.kernels import Bench
from impl.projection.replay import Place, Share

TARGET = "impl.harness.replay_check:run"
Row = dict[str, Any]


def execute(spec: StepTimeSpec, folder: Path) -> tuple[int, list[Row]]:
    """Run the job in the run folder ``folder``; return the exit code and a row per repetition and system.

    Raises :class:`ConfigError` before anything is started.
    """
    check_systems(spec)
    if any(system.live for system in spec.systems):
        raise ConfigError("a replay is of this project's engine: leave live systems out")
    device_type(spec.base.runtime.device, spec.world_size)
    code = launch.execute(TARGET, spec, folder, ranks=spec.world_size, runtime=spec.base.runtime)
    return code, read_rows(RunFolder(folder).metrics)


def run(me: Rank) -> None:
    """Step as this rank of the job in ``me.folder``, then replay the same rank's share; rank 0 writes the rows.

    Seconds are those of the slowest rank, the mean over the timed steps of a repetition.
    """
    spec: StepTimeSpec = me.settings(StepTimeSpec)
    base = spec.base
    device = me.join(device_type(base.runtime.device, me.local_ranks), base.runtime)
    mesh = Mesh.create(base.dp, base.tp, device, timeout=timedelta(seconds=base.runtime.collective_timeout_s))
    bench = Bench(device, me.rank, spec.world_size)
    place, dtype = Place(mesh.dp_rank, mesh.tp_rank), getattr(torch, base.dtype)
    real = [contestant(spec, system, mesh, me) for system in spec.systems]
    shares = [Share(r.trainer.setup.plan, r.trainer.setup.optimizers, place, device, dtype) for r in real]
    gc.collect()
    gc.disable()
    for repetition in range(-max(spec.warmup, 1), spec.repetitions):
        tokens = real[0].trainer.stream.batch(repetition + spec.warmup + 2).to(device)
        for one, share in zip(real, shares, strict=True):
            dist.barrier(group=mesh.world_group)
            one.step(tokens)
            steps = [slowest(one.step(tokens), mesh)["optimizer_step"] for _ in range(spec.timed_steps)]
            one.trainer.engine.synchronize()
            replayed = []
            for _ in range(1 + spec.timed_steps):
                share.draw()
                bench.barrier()
                replayed.append(float(bench.largest(np.array([bench.seconds(share.step)]))[0]))
            if repetition >= 0 and me.rank == 0:
                found = {"real_s": statistics.fmean(steps), "replay_s": statistics.fmean(replayed[1:])}
                append_row(me.folder.metrics, {"step": repetition, "system": one.system.id, **found})
    gc.enable()
    if me.rank == 0:
        me.folder.finish(spec, "done", result={})
    dist.barrier(group=mesh.world_group)
    dist.destroy_process_group()


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return for each system medians and quartiles of the step, of its replay, and of the ratio of the two.

    The ratio is taken within a repetition, so that a slow moment of the machine counts on both sides.
    """
    out = []
    for system in dict.fromkeys(row["system"] for row in rows):
        mine = [row for row in rows if row["system"] == system]
        columns = {
            "real_s": [row["real_s"] for row in mine],
            "replay_s": [row["replay_s"] for row in mine],
            "ratio": [row["replay_s"] / row["real_s"] for row in mine],
        }
        found: Row = {"kind": "measured", "system": system, "n": len(mine)}
        for name, values in columns.items():
            q25, median, q75 = np.quantile(values, (0.25, 0.5, 0.75))
            found |= {name: float(median), f"{name}_q25": float(q25), f"{name}_q75": float(q75)}
        out.append(found)
    return out
