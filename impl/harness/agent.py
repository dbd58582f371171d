"""Starts the ranks of one machine with torchrun's agent, with every socket on loopback.

``python -m impl.harness.agent LAUNCHER_PID FOLDER TARGET RANKS``; the launcher runs it, see
:mod:`impl.harness.launch`.  torchrun's own rendezvous listens on every network interface; the one here only on
127.0.0.1.  Exit codes of failed ranks go to :attr:`impl.harness.record.RunFolder.exits`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from impl.harness.processes import die_with_parent
from impl.harness.record import RunFolder, write_atomically

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))  # before the slow import of torch

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

LOOPBACK = "127.0.0.1"


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of one agent with itself; its store, which the ranks use too, listens on loopback only."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id
        self._store: Any = None  # kept alive: the ranks use it

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        """The ranks connect to the agent's store instead of making their own."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Make the store and return this agent as the only one."""
        listener = socket.create_server((LOOPBACK, 0), backlog=1024)
        port = listener.getsockname()[1]
        timeout = timedelta(seconds=60)
        self._store = dist.TCPStore(LOOPBACK, port, 1, True, timeout, master_listen_fd=listener.detach())  # type: ignore
        mine = dist.PrefixStore(self._run_id, self._store)  # type: ignore[reportPrivateImportUsage]
        return RendezvousInfo(mine, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        """It never closes: there are no restarts."""
        return False

    def set_closed(self) -> None:
        """Nothing to close."""

    def num_nodes_waiting(self) -> int:
        """No other agent can join."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to shut down."""
        return True


def main(folder: Path, target: str, ranks: int) -> int:
    """Run ``ranks`` workers of ``target`` to their end; return 0 if all succeeded."""
    rendezvous_handler_registry.register("loopback", LoopbackRendezvous)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="loopback",
        run_id=folder.name or "run",
        max_restarts=0,
        monitor_interval=0.1,
    )
    worker = ("-u", "-m", "impl.harness.worker", str(os.getpid()), str(folder), target)
    try:
        elastic_launch(config, sys.executable)(*worker)
    except ChildFailedError as error:
        exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
        write_atomically(RunFolder(folder).exits, json.dumps(exits))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
