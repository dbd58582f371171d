"""Why a run failed: which rank was first, and what it left behind."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from impl.harness.processes import signal_name
from impl.harness.record import RunFolder

TAIL_LINES = 40


class Diagnosis(NamedTuple):
    """Why a run failed.

    error: its first line names the rank and the cause.  lost: a process was killed from outside, so that the run may
        well go on from its checkpoint.
    """

    status: str
    error: str
    lost: bool = False


def diagnose(run: RunFolder, agent_exit: int, stopped: Sequence[int]) -> Diagnosis:
    """Return the diagnosis of a run whose ranks ended without a manifest.

    The error's first line names the rank and the cause; the traceback, or the end of a log, follows.  When one rank
    dies the others fail too, so causes are looked for in this order: a rank that was stopped; a rank that vanished
    without an error of its own (a signal, ``os._exit``); the earliest exception.

    stopped: ranks that were found stopped when the first failure showed.
    """
    errors = _errors(run.path)
    exits = _exits(run.exits)
    if stopped:
        names = ", ".join(map(str, stopped))
        rest = f"\n\nthe others: {_summary(errors[0])}\n{errors[0]['traceback']}" if errors else ""
        return Diagnosis(
            "failed", f"rank {names} was stopped (SIGSTOP or a debugger) and kept the others waiting{rest}"
        )
    known = {error["rank"] for error in errors}
    for rank, code in sorted(exits.items()):
        if rank not in known and code not in (0, -signal.SIGTERM):
            tail = _tail(run.path / f"rank-{rank}.log")
            return Diagnosis("failed", f"rank {rank} {_ending(code)}\n\n{tail}", _is_killed(code))
    if errors:
        return Diagnosis(errors[0]["status"], f"{_summary(errors[0])}\n\n{errors[0]['traceback']}")
    if agent_exit:
        error = f"torchrun's agent {_ending(agent_exit)}\n\n{_tail(run.agent_log)}"
        return Diagnosis("failed", error, _is_killed(agent_exit))
    return Diagnosis("failed", f"the ranks ended without a result\n\n{_tail(run.agent_log)}")


def _is_killed(code: int) -> bool:
    """Whether somebody else ended the process; a segmentation fault, say, is its own doing."""
    return code in (-signal.SIGKILL, -signal.SIGTERM)


def _summary(error: dict[str, Any]) -> str:
    message = error["message"].strip().splitlines()
    return f"rank {error['rank']}: {error['type']}: {message[0] if message else ''}"


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (by a user, or by the kernel when memory ran out)"
    return f"was killed by {signal_name(code)}" if code < 0 else f"ended with exit code {code} and no exception"


def _errors(folder: Path) -> list[dict[str, Any]]:
    """Return what the ranks reported, earliest first."""
    found = [json.loads(path.read_text()) for path in folder.glob("rank-*.error.json")]
    return sorted(found, key=lambda error: error["time"])


def _exits(path: Path) -> dict[int, int]:
    """Return the exit code of each failed rank, as far as the agent saw it."""
    if not path.exists():
        return {}
    return {int(rank): code for rank, code in json.loads(path.read_text()).items()}


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-TAIL_LINES:])
