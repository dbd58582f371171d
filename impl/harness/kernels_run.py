"""One job that measures kernels: processes that run the same cases in lockstep, and rank 0 that writes their rows."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from impl.errors import ConfigError
from impl.harness import launch, provenance
from impl.harness.progress import Progress
from impl.harness.record import RunFolder, append_row, read_rows
from impl.harness.setup import device_type
from impl.harness.worker import Rank
from impl.projection import kernels
from impl.projection.kernel_cases import Case, KernelsSpec
from impl.projection.kernel_table import Row
from impl.projection.kernels import Bench

TARGET = "impl.harness.kernels_run:run"
NO_TIME = "the time was used up"


KEEP_S = 1.0
"""Seconds between two looks at what a job has measured."""


def execute(spec: KernelsSpec, folder: Path, keep: Callable[[list[Row]], None]) -> tuple[int, list[Row]]:
    """Measure in the run folder ``folder``; return the exit code and the rows, those before a failure too.

    keep: is called with all rows so far whenever there are more, so that nothing is lost if this process is killed.
    Raises :class:`impl.errors.ConfigError` before anything is started.
    """
    device_type(spec.runtime.device, spec.processes)
    with _watched(folder, keep):
        code = launch.execute(TARGET, spec, folder, ranks=spec.processes, runtime=spec.runtime)
    return code, rows_of(folder)


@contextmanager
def _watched(folder: Path, keep: Callable[[list[Row]], None]) -> Iterator[None]:
    ended = threading.Event()

    def watch() -> None:
        known = 0
        while not ended.wait(KEEP_S):
            rows = rows_of(folder)
            if len(rows) > known:
                known = len(rows)
                try:
                    keep(rows)
                except ConfigError:
                    return  # the caller's own write at the end says why

    thread = threading.Thread(target=watch, name="keep kernel rows", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def rows_of(folder: Path) -> list[Row]:
    """Return the rows that a job has written."""
    lines = read_rows(RunFolder(folder).metrics)
    nothing: dict[str, Any] = {"seconds": math.nan, "q25": math.nan, "q75": math.nan, "spike": math.nan}
    given = [{k: v for k, v in row.items() if v is not None} for line in lines for row in line["rows"]]
    return [Row(**(nothing | row)) for row in given]


def place(device: str, threads: int) -> dict[str, Any]:
    """Return the columns that say where something is measured on a device of the type ``device``."""
    facts = provenance.hardware()
    name = facts["gpu"] if device == "cuda" else f"{facts['cpu']}, {facts['cores']} cores"
    torch_version = provenance.versions()["torch"] or torch.__version__
    return {"backend": device, "device": name, "torch": torch_version, "threads": threads}


def run(me: Rank) -> None:
    """Measure as this rank of the job in ``me.folder``."""
    spec: KernelsSpec = me.settings(KernelsSpec)
    device = me.join(device_type(spec.runtime.device, me.local_ranks), spec.runtime)
    bench = Bench(device, me.rank, spec.processes)
    commit = provenance.git()
    facts = place(device.type, spec.runtime.threads) | {
        "cores": provenance.hardware()["cores"] if device.type == "cpu" else 0,
        "commit": (commit["commit"] or "unknown")[:12] + ("+changes" if commit["dirty"] else ""),
        "date": provenance.now()[:10],
    }
    progress = None
    if me.terminal is not None:
        progress = Progress(me.terminal, len(spec.cases), spec.runtime.heartbeat_s, unit="kernel")
    if me.rank == 0:
        me.folder.metrics.unlink(missing_ok=True)
    begin = time.monotonic()
    measured = 0
    for number, case in enumerate(spec.cases, start=1):
        samples, note = _attempt(case, bench, spec, time.monotonic() - begin)
        measured += not note
        if me.rank == 0:
            rows = [dataclasses.asdict(row) for row in _rows(case, spec.processes, samples, note, facts)]
            append_row(me.folder.metrics, {"event": "kernel", "step": number, "rows": rows})
        if progress is not None:
            progress.advance(number, f"{case.names()[0][0]} {case.names()[0][1]}  ")
    if me.rank == 0:
        me.folder.finish(spec, "done", result={"measured": measured, "left_out": len(spec.cases) - measured})
    dist.barrier()
    dist.destroy_process_group()


def _attempt(case: Case, bench: Bench, spec: KernelsSpec, elapsed: float) -> tuple[NDArray[np.float64], str]:
    """Return the samples of ``case``, or none and why there are none; the same on all processes."""
    nothing = np.empty((0, len(case.names())))
    needed = case.bytes()
    late, lacking = bench.largest(np.array([float(elapsed > spec.seconds), needed - free_bytes(bench.device)]))
    if late:
        return nothing, f"{NO_TIME} ({spec.seconds:g} s)"
    if lacking > 0 or needed * spec.processes > _installed(bench.device):
        return nothing, f"needs {needed / 1e9:.1f} GB, {(needed - max(lacking, 0.0)) / 1e9:.1f} GB are free"
    try:
        return kernels.measure(case, bench, spec.case_seconds), ""
    except torch.OutOfMemoryError:
        if bench.processes > 1:
            raise  # the others wait in a collective: better to end together
        return nothing, f"needs more than the {free_bytes(bench.device) / 1e9:.1f} GB that are free"
    finally:
        gc.collect()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


def free_bytes(device: torch.device) -> float:
    """Return the memory that a process can still take on ``device``."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    free = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), "0")
    return 1024.0 * int(free)


def _installed(device: torch.device) -> float:
    """Return the memory that all processes share: no limit where each has a GPU of its own."""
    return math.inf if device.type == "cuda" else free_bytes(device)


def _rows(case: Case, processes: int, samples: NDArray[np.float64], note: str, facts: dict[str, Any]) -> Sequence[Row]:
    out = []
    for column, (kernel, key, size) in enumerate(case.names()):
        values = samples[:, column] if len(samples) else np.empty(0)
        q25, seconds, q75 = np.quantile(values, (0.25, 0.5, 0.75)) if len(values) else (math.nan,) * 3
        spike = math.nan
        if kernel == "update" and len(samples) and samples.shape[1] > 1:
            spike = float(np.median(samples[:, 1]))
        times = {"seconds": float(seconds), "q25": float(q25), "q75": float(q75), "n": len(values), "spike": spike}
        dtype = getattr(case, "dtype", "float32")
        row = {"kernel": kernel, "key": key, "size": size, "processes": processes, "dtype": dtype, "note": note}
        out.append(Row(**row, **times, **facts))
    return out
