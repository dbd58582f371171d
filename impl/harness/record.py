"""The folder of one run: who may write there, what it holds, and how a run is continued.

``config.yaml`` (resolved settings), ``metrics.jsonl`` (a row a step, append-only), ``checkpoint/``, ``rank-R.log``,
and ``manifest.json``, which is written last: a folder without it holds an unfinished run.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import secrets
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import yaml

from impl.errors import ConfigError
from impl.harness import provenance
from impl.harness.processes import has_ended, this_process
from impl.harness.spec import Frozen, load_yaml, parse

SCHEMA = 1
FINAL = ("done", "diverged")
"""Statuses that a second start with the same settings would only repeat."""
EXIT_CODES = {"done": 0, "failed": 1, "corrupt": 1, "out-of-memory": 1, "unfinished": 1, "diverged": 3}


class Spec(Protocol):
    """What the record asks of a run's settings."""

    @property
    def digest(self) -> str:
        """SHA-256 of what decides the result."""
        ...

    def resolved(self) -> dict[str, Any]:
        """All settings as plain data."""
        ...


class CorruptRecord(Exception):  # noqa: N818 - a status of its own, not a programming error
    """A file of the record cannot be read; the run ends with status ``corrupt``."""


class RunFolder:
    """The folder ``path`` of a run.  Making the object touches nothing."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.config = self.path / "config.yaml"
        self.manifest_path = self.path / "manifest.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoint"
        self.agent_log = self.path / "torchrun.log"
        self.exits = self.path / ".exits.json"
        self.ended = self.path / "ended"  # what the workflow looks for, see impl.cli.settle
        self._attempt = self.path / ".attempt.json"
        self._lock: int | None = None

    def claim(self, spec: Spec, *, wait: bool = False) -> dict[str, Any] | None:
        """Lock the folder for the settings ``spec``; return its manifest if the run has ended for good, else None.

        The lock is held until every process that inherited :attr:`lock` has ended.  A folder whose settings have
        another digest is never changed.

        wait: wait, as long as it takes, for another process that works in the folder; a second one is refused
            otherwise.

        Raises :class:`ConfigError`.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(f"cannot write to run folder {self.path}: {error.strerror}") from None
        self._take_lock(wait=wait)
        try:
            self._check_settings(spec)
            manifest = self.manifest()
            if manifest is None or manifest.get("status") not in FINAL:
                if not self.wait_for_ranks(math.inf if wait else 10.0):
                    raise ConfigError(f"run folder {self.path} is in use by ranks of an earlier start: stop them first")
                write_atomically(self.config, yaml.safe_dump(spec.resolved(), sort_keys=True))
                return None
            return manifest
        except BaseException:
            self.release()
            raise

    @property
    def lock(self) -> int:
        """Descriptor that keeps the folder locked while any process has it open."""
        if self._lock is None:
            raise ValueError("the folder is not claimed")
        return self._lock

    def release(self) -> None:
        """Close this process's hold on the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def manifest(self) -> dict[str, Any] | None:
        """Return the manifest; None if there is none that can be read."""
        try:
            data = json.loads(self.manifest_path.read_text())
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) else None

    def has_result(self) -> bool:
        """Return whether the run has ended by what it computes: it was not interrupted, and lost no process."""
        manifest = self.manifest()
        return manifest is not None and manifest.get("status") != "unfinished" and not manifest.get("lost")

    def begin(self) -> None:
        """Start an attempt: forget how the last one ended, note when and on what machine and code this one starts."""
        for stale in (self.manifest_path, self.exits, *self.path.glob("rank-*.error.json")):
            stale.unlink(missing_ok=True)
        self._forget_processes()
        start = {
            "run_id": f"{time.strftime('%Y%m%dt%H%M%S', time.gmtime())}-{secrets.token_hex(4)}",
            "started": provenance.now(),
            **provenance.collect(),
        }
        write_atomically(self._attempt, json.dumps(start))

    def finish(
        self, spec: Spec, status: str, *, result: Any = None, error: Any = None, lost: bool = False
    ) -> dict[str, Any]:
        """Write the manifest, atomically; return it.

        lost: the run did not end by what it computes: one of its processes was killed.
        """
        start = json.loads(self._attempt.read_text())
        ended = provenance.now()
        manifest = {
            "schema": SCHEMA,
            "kind": "measured",
            "run_id": start["run_id"],
            "status": status,
            "config": spec.resolved(),
            "config_digest": spec.digest,
            **{key: start[key] for key in ("git", "versions", "hardware", "started")},
            "ended": ended,
            "seconds": _seconds_between(start["started"], ended),
            "result": result,
            "error": error,
            "lost": lost,
        }
        write_atomically(self.manifest_path, json.dumps(finite(manifest), indent=1, allow_nan=False) + "\n")
        self._attempt.unlink(missing_ok=True)
        self._forget_processes()
        return manifest

    def _forget_processes(self) -> None:
        for pid in self.path.glob("rank-*.pid"):
            pid.unlink(missing_ok=True)

    def hold_as_rank(self) -> int:
        """Take a rank's share of the second lock, which ends with the process; a new launcher waits for it."""
        descriptor = os.open(self.path / ".ranks.lock", os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return descriptor

    def _take_lock(self, seconds: float = 10.0, *, wait: bool = False) -> None:
        deadline, waiting = time.monotonic() + seconds, False
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                holder = os.pread(self.lock, 200, 0).decode(errors="replace").strip()
                if has_ended(holder) and time.monotonic() < deadline:
                    time.sleep(0.05)  # the processes of a killed launcher are about to follow it
                    continue
                if wait:
                    if not waiting:
                        print(f"{self.path.name}: waiting for {holder or 'another process'}, which runs it", flush=True)
                    waiting = True
                    time.sleep(0.5)
                    continue
                self.release()
                raise ConfigError(
                    f"run folder {self.path} is in use by {holder or 'another process'}: wait for it or give another "
                    "--out"
                ) from None
            except OSError as error:
                self.release()
                raise ConfigError(f"cannot lock run folder {self.path}: {error.strerror}") from None
        os.ftruncate(self.lock, 0)
        os.pwrite(self.lock, f"{this_process()}\n".encode(), 0)

    def _check_settings(self, spec: Spec) -> None:
        if not self.config.exists():
            leftovers = [p.name for p in (self.manifest_path, self.metrics, self.checkpoints) if p.exists()]
            if leftovers:
                raise ConfigError(
                    f"run folder {self.path} holds {', '.join(leftovers)} but no config.yaml: give another --out"
                )
            return
        try:
            found = load_config(self.path, type(spec))  # type: ignore[type-var]
        except ConfigError as error:
            raise ConfigError(f"run folder {self.path} cannot be continued ({error}): give another --out") from None
        if found.digest != spec.digest:
            changed = ", ".join(differences(found.resolved(), spec.resolved()))
            raise ConfigError(
                f"run folder {self.path} belongs to settings {found.digest[:12]}, these are {spec.digest[:12]} "
                f"(different: {changed}): give another --out or delete the folder"
            )

    def wait_for_ranks(self, seconds: float = 10.0) -> bool:
        """Wait until no rank process uses the folder; return False if some still do after ``seconds``."""
        descriptor = os.open(self.path / ".ranks.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            deadline = time.monotonic() + seconds
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return True
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        return False
                    time.sleep(0.05)
        finally:
            os.close(descriptor)


def load_config(path: Path, cls: type[Frozen]) -> Any:
    """Return the settings in ``path/config.yaml`` as ``cls``; raises :class:`ConfigError`."""
    return parse(cls, load_yaml(path / "config.yaml"))


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers, and a crash, see the old content or the new, never a part."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")  # two jobs may mark one run
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make renames inside ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append one JSON line in a single write; numbers that are not finite become null."""
    line = json.dumps(finite(row), allow_nan=False) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, empty if there is none.

    A last line that a crash cut short is left out; raises :class:`CorruptRecord` for any other that is no JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    rows = []
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline is not whole
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise CorruptRecord(f"{path} line {number} is not a JSON object: move the folder away and start again")
        rows.append(row)
    return rows


def cut_rows(path: Path, step: int) -> list[dict[str, Any]]:
    """Drop the rows after ``step``, which a run that resumes there will write again; return those that stay."""
    rows = [row for row in read_rows(path) if row["step"] <= step]
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))
    return rows


def finite(data: Any) -> Any:
    """Return plain data with every float that is not finite replaced by None: strict JSON has no NaN."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def differences(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield what differs between two sets of settings, in the form ``key.sub 1 -> 2``."""
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            yield from differences(a, b, f"{prefix}{key}.")
        elif a != b:
            yield f"{prefix}{key} {a!r} -> {b!r}"


def _seconds_between(start: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds()
