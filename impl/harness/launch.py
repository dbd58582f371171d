"""Starts the ranks of a run on this machine, watches them, and makes sure that the run leaves a record.

launcher (this process) -> agent (torchrun's, :mod:`impl.harness.agent`) -> one worker per rank
(:mod:`impl.harness.worker`).  Each dies with its parent, so that nothing outlives a killed launcher.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from impl.errors import ConfigError
from impl.harness.diagnosis import diagnose
from impl.harness.processes import is_stopped
from impl.harness.record import EXIT_CODES, FINAL, RunFolder, Spec
from impl.harness.spec import RuntimeSpec
from impl.harness.worker import status_of

POLL_S = 0.1
GRACE_S = 5.0
"""After one rank has failed, the others may still write their own errors; then everything is killed."""


class Interrupted(BaseException):
    """SIGINT, SIGTERM or SIGHUP reached the launcher."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class Watch:
    """What the launcher saw while the ranks ran.

    exit_code: of the agent.
    stopped: ranks that were found stopped when the run failed.
    """

    exit_code: int = 0
    stopped: list[int] = field(default_factory=list)


def inside_torchrun() -> bool:
    """Return whether this process is a rank that the user's own torchrun started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def torchrun_ranks(world_size: int, meaning: str) -> int:
    """Return the number of torchrun's ranks on this machine.

    Raises :class:`ConfigError` unless torchrun started ``world_size`` ranks altogether.
    """
    found = int(os.environ["WORLD_SIZE"])
    if found != world_size:
        raise ConfigError(f"torchrun started {found} ranks but {meaning} = {world_size}: make the two equal")
    return int(os.environ["LOCAL_WORLD_SIZE"])


def execute(target: str, spec: Spec, out: Path, *, ranks: int, runtime: RuntimeSpec, wait: bool = False) -> int:
    """Run ``target`` (``module:function``, see :mod:`impl.harness.worker`) on ``ranks`` ranks in the folder ``out``.

    Does nothing if the folder holds the ended run of the same settings.  ``wait`` as in :meth:`RunFolder.claim`.
    Returns the exit code: 0 done, 3 diverged, 1 otherwise, 128 + signal if interrupted.  Raises
    :class:`impl.errors.ConfigError` before anything is started if the folder cannot be used.  Call it from the main
    thread, whose end would end the ranks.
    """

    def on_ranks(run: RunFolder) -> None:
        with _agent(target, run, ranks, runtime) as process:
            watch = _watch(process, run, runtime.collective_timeout_s)
        if run.manifest() is None:
            run.wait_for_ranks()
            found = diagnose(run, watch.exit_code, watch.stopped)
            run.finish(spec, found.status, error=found.error, lost=found.lost)

    return _recorded(on_ranks, spec, out, wait)


def execute_here(work: Callable[[RunFolder], None], spec: Spec, out: Path, *, wait: bool = False) -> int:
    """Run ``work``, which writes the manifest, in this process and the folder ``out``; otherwise as :func:`execute`."""

    def here(run: RunFolder) -> None:
        try:
            work(run)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            run.finish(spec, status_of(error), error=f"{type(error).__name__}: {error}\n\n{text}")

    return _recorded(here, spec, out, wait)


def _recorded(work: Callable[[RunFolder], None], spec: Spec, out: Path, wait: bool) -> int:
    """Run ``work``, which writes the manifest unless it is interrupted, as the only one in the folder ``out``."""
    run = RunFolder(out)
    manifest = run.claim(spec, wait=wait)
    try:
        if manifest is not None:
            print(f"nothing to do: {run.path} is {manifest['status']} with these settings")
            return EXIT_CODES[manifest["status"]]
        run.begin()
        try:
            with _signals():
                work(run)
        except Interrupted as interrupt:
            run.finish(spec, "unfinished", error=f"interrupted by {interrupt}")
            print(f"interrupted by {interrupt}: start the same command again to continue", file=sys.stderr)
            return 128 + interrupt.number
        return _conclude(run, run.manifest() or {})
    finally:
        run.release()


def _conclude(run: RunFolder, manifest: dict[str, Any]) -> int:
    """Return the exit code of a run that has ended, and say why if it is not done."""
    status = manifest["status"]
    if status not in FINAL:
        first = (manifest["error"] or status).splitlines()[0]
        print(f"error: {status}: {first} (more in {run.manifest_path})", file=sys.stderr)
    return EXIT_CODES[status]


@contextmanager
def _agent(target: str, run: RunFolder, ranks: int, runtime: RuntimeSpec) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "impl.harness.agent", str(os.getpid()), str(run.path), target, str(ranks)]
    sys.stdout.flush()
    with run.agent_log.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=log,
            env=_environment(runtime),
            pass_fds=(run.lock,),
            start_new_session=True,  # Ctrl-C reaches the launcher alone
        )
    try:
        yield process
    finally:
        _kill(process, run)


def _environment(runtime: RuntimeSpec) -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")])),
        "OMP_NUM_THREADS": str(runtime.threads),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }


@contextmanager
def _signals() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGHUP into :class:`Interrupted` inside the body."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("runs must be launched from the main thread")

    def interrupt(number: int, _frame: Any) -> None:
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(process: subprocess.Popen[bytes], run: RunFolder, timeout: float) -> Watch:
    """Wait for the agent; kill it when a rank has failed and the rest does not end, or when a rank stays stopped."""
    watch = Watch()
    failed_at: float | None = None
    stopped_since: dict[int, float] = {}
    while process.poll() is None:
        time.sleep(POLL_S)
        now = time.monotonic()
        stopped = _stopped_ranks(run)
        stopped_since = {rank: stopped_since.get(rank, now) for rank in stopped}
        if failed_at is None and (any(run.path.glob("rank-*.error.json")) or run.exits.exists()):
            failed_at, watch.stopped = now, stopped
        if failed_at is not None and now - failed_at > GRACE_S:
            process.kill()
        if any(now - since > timeout + GRACE_S for since in stopped_since.values()):
            watch.stopped = stopped
            process.kill()
    watch.exit_code = process.wait()
    return watch


def _stopped_ranks(run: RunFolder) -> list[int]:
    ranks = []
    for path in run.path.glob("rank-*.pid"):
        try:
            text = path.read_text()
        except FileNotFoundError:  # the run has just ended
            continue
        if text.isdigit() and is_stopped(int(text)):
            ranks.append(int(path.stem.removeprefix("rank-")))
    return sorted(ranks)


def _kill(process: subprocess.Popen[bytes], run: RunFolder) -> None:
    """Kill the agent, with which the ranks die, if it still runs."""
    if process.poll() is None:
        process.kill()
        process.wait()
        run.wait_for_ranks()
