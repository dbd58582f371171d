"""Start gloo ranks on loopback for a test, collect what each returns, and never hang."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COLLECTIVE_TIMEOUT = timedelta(seconds=30)
GRACE_S = 2.0  # after one rank has failed, the others may still write their own tracebacks


class RankError(AssertionError):
    """A rank failed, died or did not end in time; the message holds the rank's traceback."""


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Return ``[function(rank, world, *args) for each rank]``, each run in its own spawned process.

    ``function`` must be defined at the top level of a module; it finds a ready gloo process group over all ``world``
    ranks, and one OMP thread.  Arguments and results are pickled.  After ``timeout`` seconds every rank is killed.

    Raises :class:`RankError` with the traceback of the rank that failed first, or, after a time-out, with the place
    where each unfinished rank stood.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        context = mp.get_context("spawn")
        processes = [
            context.Process(target=_rank, args=(rank, world, function, args, folder), daemon=True)
            for rank in range(world)
        ]
        try:
            for process in processes:
                process.start()
            _join(processes, timeout, Path(folder))
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        return [pickle.loads((Path(folder) / f"{rank}.result").read_bytes()) for rank in range(world)]


@contextlib.contextmanager
def one_rank() -> Iterator[dist.ProcessGroup]:
    """Make the test's own process a gloo world of one rank and yield its group."""
    with tempfile.TemporaryDirectory(prefix="rank-") as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            group = dist.group.WORLD
            assert group is not None
            yield group
        finally:
            dist.destroy_process_group()


def _rank(rank: int, world: int, function: Callable[..., Any], args: tuple[Any, ...], folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    torch.set_num_threads(1)
    here = Path(folder)
    with (here / f"{rank}.stack").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack)  # the parent asks where we stand when time is up
        try:
            store = f"file://{here / 'store'}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=COLLECTIVE_TIMEOUT)
            result = pickle.dumps(function(rank, world, *args))
            dist.destroy_process_group()
            (here / f"{rank}.result").write_bytes(result)
        except BaseException:
            # written aside and renamed, so that the parent never reads half of it
            text = f"{time.monotonic()}\n{traceback.format_exc()}"
            (here / f"{rank}.part").write_text(text)
            (here / f"{rank}.part").rename(here / f"{rank}.error")
            os._exit(1)  # a normal exit could wait for threads of a broken process group
        os._exit(0)


def _join(processes: Sequence[BaseProcess], timeout: float, folder: Path) -> None:
    deadline = time.monotonic() + timeout
    failed = False
    alive = dict(enumerate(processes))
    while alive:
        wait([p.sentinel for p in alive.values()], timeout=max(0.0, deadline - time.monotonic()))
        for rank, process in list(alive.items()):
            if process.is_alive():
                continue
            process.join()
            del alive[rank]
            if process.exitcode and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if alive and time.monotonic() >= deadline:
            break
    if failed:
        raise RankError(_first_failure(processes, folder))
    if alive:
        stacks = "\n".join(_stack(rank, alive[rank], folder) for rank in sorted(alive))
        raise RankError(f"ranks {sorted(alive)} did not end within {timeout:g} s\n{stacks}")


def _stack(rank: int, process: BaseProcess, folder: Path) -> str:
    """Ask a living rank for the place where it stands; it is killed soon after."""
    path = folder / f"{rank}.stack"
    if not path.exists() or process.pid is None:
        return f"rank {rank} was still starting"
    os.kill(process.pid, signal.SIGUSR1)
    process.join(0.5)
    return f"rank {rank} stood at\n{path.read_text()}"


def _first_failure(processes: Sequence[BaseProcess], folder: Path) -> str:
    reports = []
    for rank, process in enumerate(processes):
        error = folder / f"{rank}.error"
        if error.exists():
            when, _, text = error.read_text().partition("\n")
            reports.append((float(when), f"rank {rank} of {len(processes)} failed:\n{text}"))
        elif process.exitcode:  # killed by a signal: that is the cause of whatever its peers report
            reports.append((0.0, f"rank {rank} of {len(processes)} died with exit code {process.exitcode}"))
    return min(reports)[1]
