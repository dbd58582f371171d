"""One rank replay: its settings, the processes that do it, and what comes out.

With several processes each replays a rank of its own at the same time, as ranks that share the cores of a machine do.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from pydantic import Field

from impl.canzona.strategies import PlanOptions
from impl.errors import ConfigError
from impl.harness import launch
from impl.harness.kernels_run import free_bytes
from impl.harness.progress import Progress
from impl.harness.record import RunFolder, append_row, read_rows
from impl.harness.setup import Setup, device_type, prepare
from impl.harness.spec import Frozen, RunSpec, RuntimeSpec
from impl.harness.tiers import canonical_digest
from impl.harness.worker import Rank
from impl.projection import replay
from impl.projection.kernels import Bench
from impl.projection.machine import BYTES
from impl.projection.replay import Place

TARGET = "impl.harness.replay_run:run"


class ReplaySpec(Frozen):
    """One replay.

    ranks: numbers in the mesh, ``dp_rank * tp + tp_rank``; empty for all.  Those with equal work are replayed once.
    processes: that replay at the same time.  samples: timed steps (or refresh periods) of every rank.
    """

    model: str
    layers: int | None = Field(default=None, gt=0)
    strategy: str = "canzona"
    optimizer: str = "muon"
    optimizer_settings: dict[str, Any] = Field(default_factory=dict)
    adamw_settings: dict[str, Any] = Field(default_factory=dict)
    dp: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    plan: PlanOptions = PlanOptions()
    ranks: tuple[int, ...] = ()
    processes: int = Field(default=1, gt=0)
    samples: int = Field(default=10, gt=0)
    runtime: RuntimeSpec = RuntimeSpec(collective_timeout_s=300.0)

    def resolved(self) -> dict[str, Any]:
        """Return every setting as plain data."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """SHA-256 of the settings."""
        return canonical_digest(self.resolved())

    def setup(self) -> Setup:
        """Return the plan and the optimizers; raises :class:`ConfigError`."""
        own = ("model", "layers", "strategy", "optimizer", "optimizer_settings", "adamw_settings", "dp", "tp", "dtype")
        settings = {name: getattr(self, name) for name in own}
        return prepare(RunSpec(**settings, batch=self.dp, plan=self.plan))

    def places(self) -> list[Place]:
        """Return the ranks to replay; raises :class:`ConfigError` for one that the mesh does not have."""
        size = self.dp * self.tp
        for rank in self.ranks:
            if not 0 <= rank < size:
                raise ConfigError(
                    f"rank {rank} is not in a {self.dp} x {self.tp} mesh: give numbers from 0 to {size - 1}"
                )
        return [Place(*divmod(rank, self.tp)) for rank in self.ranks or range(size)]


def execute(spec: ReplaySpec, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Replay in the run folder ``folder``; return the exit code and a row per distinct share."""
    spec.setup()
    spec.places()
    device_type(spec.runtime.device, spec.processes)
    code = launch.execute(TARGET, spec, folder, ranks=spec.processes, runtime=spec.runtime)
    return code, [row["share"] for row in read_rows(RunFolder(folder).metrics)]


def run(me: Rank) -> None:
    """Replay as this process of the job in ``me.folder``; rank 0 writes the rows."""
    spec: ReplaySpec = me.settings(ReplaySpec)
    setup = spec.setup()
    device = me.join(device_type(spec.runtime.device, me.local_ranks), spec.runtime)
    bench = Bench(device, me.rank, spec.processes)
    shares = replay.distinct(setup.plan, spec.places())
    progress = None
    if me.terminal is not None:
        progress = Progress(me.terminal, len(shares), spec.runtime.heartbeat_s, unit="share")
    for first in range(0, len(shares), spec.processes):
        now = shares[first : first + spec.processes]
        mine = now[me.rank % len(now)]  # whoever has none of his own keeps the machine busy with another's
        row = _replay(spec, setup, mine, bench)
        rows = _gathered(row, spec.processes)[: len(now)]
        if me.rank == 0:
            for share in rows:
                append_row(me.folder.metrics, {"event": "share", "step": first + 1, "share": share})
        if progress is not None:
            progress.advance(min(first + spec.processes, len(shares)))
    if me.rank == 0:
        me.folder.finish(spec, "done", result={"shares": len(shares)})
    dist.barrier()
    dist.destroy_process_group()


def _replay(spec: ReplaySpec, setup: Setup, share: tuple[Place, list[Place]], bench: Bench) -> dict[str, Any]:
    """Return the row of one share; every process must call."""
    place, members = share
    plan, rules = setup.plan, setup.optimizers
    needed = replay.share_bytes(plan, rules, place, BYTES[spec.dtype])
    row: dict[str, Any] = {
        "rank": place.number(plan.tp),
        "ranks": [member.number(plan.tp) for member in members],
        "flops": replay.flops(plan, rules, place),
        "bytes": needed,
    }
    together = spec.processes if bench.device.type == "cpu" else 1
    lacking = bench.largest(np.array([needed * together - free_bytes(bench.device)]))[0]
    if lacking > 0:
        free = (needed * together - lacking) / 1e9
        return {**row, "note": f"needs {needed / 1e9:.1f} GB, {free / together:.1f} GB are free"}
    try:
        work = replay.Share(plan, rules, place, bench.device, getattr(torch, spec.dtype))
        period = replay.period_of(rules)
        times = replay.time_share(work, spec.samples, period, bench.seconds, bench.barrier)
    except torch.OutOfMemoryError:
        if bench.processes > 1:
            raise
        return {**row, "note": f"needs more than the {free_bytes(bench.device) / 1e9:.1f} GB that are free"}
    finally:
        work = None
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    q25, median, q75 = np.quantile(times, (0.25, 0.5, 0.75))
    found = {"seconds": float(median), "q25": float(q25), "q75": float(q75), "n": len(times), "samples": times}
    return {**row, **found}


def _gathered(row: dict[str, Any], processes: int) -> list[dict[str, Any]]:
    if processes == 1:
        return [row]
    rows: list[Any] = [None] * processes
    dist.all_gather_object(rows, row)
    return rows


def summary(spec: ReplaySpec, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what a replay found: the slowest rank, mean and ratio over the ranks that were replayed.

    ``step_s`` is what the optimizer step takes.  If all shares ran at the same time it is the median over samples of
    the slowest; else the slowest median.
    """
    timed = [row for row in rows if "seconds" in row]
    out: dict[str, Any] = {"kind": "measured", "settings": spec.resolved(), "shares": list(rows)}
    if not timed:
        return out
    slowest = max(timed, key=lambda row: row["seconds"])
    mean = sum(row["seconds"] * len(row["ranks"]) for row in timed) / sum(len(row["ranks"]) for row in timed)
    planned = [row["flops"] for row in timed for _ in row["ranks"]]
    step = slowest["seconds"]
    if len(timed) <= spec.processes:
        step = statistics.median(max(together) for together in zip(*(row["samples"] for row in timed), strict=True))
    return out | {
        "step_s": step,
        "slowest_rank": slowest["rank"],
        "slowest_s": slowest["seconds"],
        "mean_s": mean,
        "ratio": slowest["seconds"] / mean,
        "planned_flops_ratio": max(planned) / (sum(planned) / len(planned)) if sum(planned) else None,
    }
