"""The life of one rank process around the function that does its work.

``python -m impl.harness.worker AGENT_PID FOLDER MODULE:FUNCTION`` under torchrun's agent.  The function is called with
a :class:`Rank`.  If it raises, ``rank-R.error.json`` holds what and where, and the process ends at once, without
waiting for other ranks.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from impl.errors import ConfigError
from impl.harness.processes import die_with_parent
from impl.harness.record import CorruptRecord, RunFolder, Spec, load_config, write_atomically

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from impl.harness.spec import Frozen, RuntimeSpec

START_TIMEOUT = timedelta(minutes=5)
"""Ranks import at different speeds on a busy machine; that is no reason to fail."""
LOST_SIGNS = (
    *("Connection closed by", "Connection reset by", "Connection refused", "Broken pipe"),
    *("failed to recv", "ncclRemoteError", "remote process exit"),
)
"""What gloo, the store and NCCL say when the process at the other end is gone."""
WAIT_TIMEOUT = timedelta(days=30)
"""Longer than any job may run: who waits for another process waits until it ends."""


@dataclass(frozen=True)
class Rank:
    """What a rank process knows about itself before it joins the others.

    folder: of the run.
    local_rank, local_ranks: number among the ranks of this machine, and how many these are.
    terminal: where rank 0 reports progress; None on other ranks.
    store: the store that all ranks share, if the process is in touch with it already.
    """

    folder: RunFolder
    rank: int
    local_rank: int
    local_ranks: int
    terminal: TextIO | None
    store: Store | None = None

    def settings(self, cls: type[Frozen]) -> Any:
        """Return the run's settings, from its ``config.yaml``."""
        return load_config(self.folder.path, cls)

    def join(self, device_type: str, runtime: RuntimeSpec) -> torch.device:
        """Apply ``runtime``, enter the default process group (NCCL for ``cuda``, gloo for ``cpu``), return the device.

        All ranks must call, and wait here for the last one to arrive.  Afterwards a collective that takes longer than
        the time-out raises.
        """
        import torch
        import torch.distributed as dist

        torch.set_num_threads(runtime.threads)
        torch.use_deterministic_algorithms(runtime.deterministic)
        # a debugging aid that costs time, nothing else; torch sets the attribute dynamically
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        device = torch.device("cpu") if device_type == "cpu" else torch.device("cuda", self.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if runtime.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS has no other way to be told
        store, world = self.store or open_store(), int(os.environ["WORLD_SIZE"])
        store.set(f"arrived-{self.rank}", "")
        store.wait([f"arrived-{other}" for other in range(world)], START_TIMEOUT)
        timeout = timedelta(seconds=runtime.collective_timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=world, timeout=timeout)
        return device


def this_rank(folder: Path, terminal: TextIO) -> Rank:
    """Return this process's :class:`Rank` from the environment that torchrun sets."""
    rank, local, ranks = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return Rank(RunFolder(folder), rank, local, ranks, terminal if rank == 0 else None)


def find(target: str) -> Callable[[Rank], None]:
    """Return the function that ``module:function`` names."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def report_error(folder: Path, rank: int, error: BaseException) -> dict[str, Any]:
    """Write ``rank-R.error.json``; return its content: status, time, type, message and traceback."""
    report = {
        "rank": rank,
        "time": time.time(),
        "status": status_of(error),
        "type": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
    }
    write_atomically(folder / f"rank-{rank}.error.json", json.dumps(report))
    return report


def join_run(target: str, spec: Spec, folder: Path, *, wait: bool = False) -> int:
    """Become a rank of a run that the user's own torchrun starts, on one machine or several; return the exit code.

    Rank 0 claims the folder, which all machines must see, and the others touch it only after that.  A rank that fails
    writes the manifest itself.  ``wait`` as in :meth:`impl.harness.record.RunFolder.claim`.  Raises
    :class:`impl.errors.ConfigError` on all ranks if the folder cannot be used.
    """
    from impl.harness.record import EXIT_CODES

    die_with_parent(os.getppid())
    me = replace(this_rank(folder, sys.stdout), store=open_store())
    run = me.folder
    ended = _claim(me, spec, wait)
    if ended:
        if me.rank == 0:
            print(f"nothing to do: {run.path} is {ended} with these settings")
        return EXIT_CODES[ended]
    run.hold_as_rank()
    try:
        find(target)(me)
    except BaseException as error:
        report = report_error(run.path, me.rank, error)
        if run.manifest() is None:
            error_text = f"rank {me.rank}: {report['traceback']}"
            run.finish(spec, report["status"], error=error_text, lost=_lost_another(error))
        _leave(f"rank {me.rank}: {error}", 1)
    manifest = run.manifest() or {}
    _leave("", EXIT_CODES.get(manifest.get("status", "done"), 1) if me.rank == 0 else 0)


def _lost_another(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone, whose own end is the cause."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(sign in text for sign in LOST_SIGNS)


def open_store() -> Store:
    """Return the store of the ranks that torchrun started."""
    import torch.distributed as dist

    return next(dist.rendezvous("env://", timeout=START_TIMEOUT))[0]  # type: ignore[attr-defined]


def _claim(me: Rank, spec: Spec, wait: bool) -> str:
    """Claim the folder on rank 0 and tell the others; return the status of a run that has ended for good, else ''."""
    assert me.store is not None
    if me.rank == 0:
        try:
            ended = me.folder.claim(spec, wait=wait)
            if ended is None:
                me.folder.begin()
        except ConfigError as error:
            me.store.set("claim", f"refused:{error}")
            raise
        me.store.set("claim", f"ended:{ended['status'] if ended else ''}")
    me.store.wait(["claim"], WAIT_TIMEOUT if wait else START_TIMEOUT)
    verdict, _, text = me.store.get("claim").decode().partition(":")
    if verdict == "refused":
        raise ConfigError(text)
    return text


def main(parent: int, folder: Path, target: str) -> NoReturn:
    """Run ``target`` as the rank that torchrun's agent ``parent`` started; never returns."""
    terminal = os.fdopen(os.dup(1), "w")
    me = this_rank(folder, terminal)
    log = os.open(folder / f"rank-{me.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable()
    me.folder.hold_as_rank()
    (folder / f"rank-{me.rank}.pid").write_text(str(os.getpid()))
    try:
        find(target)(me)
    except BaseException as error:
        traceback.print_exc()
        report_error(folder, me.rank, error)
        _leave("", 1)
    _leave("", 0)


def _leave(message: str, code: int) -> NoReturn:
    """End the process without destructors: those of process groups may wait for ranks that are gone."""
    if message:
        print(message, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def status_of(error: BaseException) -> str:
    """Return the status of a run that ``error`` ended."""
    import torch

    if isinstance(error, CorruptRecord):
        return "corrupt"
    text = str(error)
    memory = isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)
    )
    return "out-of-memory" if memory else "failed"


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))  # before the slow imports
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
