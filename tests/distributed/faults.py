"""Targets for :mod:`impl.harness.launch` that go wrong in the ways that real ranks do."""

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from impl.harness.spec import RunSpec
from impl.harness.worker import Rank


def _join(me: Rank) -> None:
    me.join("cpu", me.settings(RunSpec).runtime)
    dist.all_reduce(torch.ones(1))


def _wait_for_others() -> None:
    dist.all_reduce(torch.ones(1))


def raise_on_rank_1(me: Rank) -> None:
    _join(me)
    if me.rank == 1:
        raise ValueError("no such luck\nand more")
    _wait_for_others()


def killed_on_rank_1(me: Rank) -> None:
    _join(me)
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for_others()


def exit_on_rank_0(me: Rank) -> None:
    _join(me)
    if me.rank == 0:
        os._exit(7)
    _wait_for_others()


def segfault_on_rank_1(me: Rank) -> None:
    _join(me)
    if me.rank == 1:
        import ctypes

        ctypes.string_at(0)
    _wait_for_others()


def stopped_on_rank_1(me: Rank) -> None:
    _join(me)
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    _wait_for_others()


def all_stopped(me: Rank) -> None:
    _join(me)
    os.kill(os.getpid(), signal.SIGSTOP)


def out_of_memory_on_rank_1(me: Rank) -> None:
    _join(me)
    if me.rank == 1:
        torch.empty(2**60, dtype=torch.uint8)
    _wait_for_others()


def killed_before_joining(me: Rank) -> None:
    if me.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    _join(me)


def wait(me: Rank) -> None:
    """Run until killed, once every rank has opened its sockets."""
    _join(me)
    (me.folder.path / f"ready-{me.rank}").touch()
    time.sleep(120)


def kill_launcher_at_step_5(me: Rank) -> None:
    """Train, and have rank 0 kill -9 the launcher in step 5, once the checkpoint of step 3 is whole."""
    from impl.harness import training  # slow to import, and not needed by the others

    step = training.Trainer.step

    def step_or_kill(self: training.Trainer, number: int, *, audited: bool) -> bool:
        if number == 5:
            if self.rank == 0:
                deadline = time.monotonic() + 60
                while not (me.folder.checkpoints / "step-000003").exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
                with open(f"/proc/{os.getppid()}/stat") as stat:
                    os.kill(int(stat.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
            time.sleep(60)
        return step(self, number, audited=audited)

    training.Trainer.step = step_or_kill
    training.train(me)


def kill_launcher_while_step_6_is_saved(me: Rank) -> None:
    """Train, let rank 1 not finish its file of step 6's checkpoint, and have rank 0 kill -9 the launcher in step 8."""
    from impl.harness import safetensors_storage, training

    step, write = training.Trainer.step, safetensors_storage.SafetensorsWriter.write_data

    def step_or_kill(self: training.Trainer, number: int, *, audited: bool) -> bool:
        if number == 8:
            if self.rank == 0:
                with open(f"/proc/{os.getppid()}/stat") as stat:
                    os.kill(int(stat.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
            time.sleep(60)
        return step(self, number, audited=audited)

    def write_forever(self: safetensors_storage.SafetensorsWriter, *arguments: Any) -> Any:
        done = write(self, *arguments)
        if me.rank == 1 and "step-000006" in str(self._draft):
            time.sleep(60)
        return done

    training.Trainer.step = step_or_kill
    safetensors_storage.SafetensorsWriter.write_data = write_forever
    training.train(me)


def kill_pipeline_launcher_at_update_6(me: Rank) -> None:
    """Train a pipeline, and have its last stage kill -9 the launcher ahead of update 6."""
    from impl.rotation import runtime

    update = runtime.Runner._update

    def update_or_kill(self: runtime.Runner, action: Any) -> None:
        if action.number == 5:
            if self.stage.is_last:
                with open(f"/proc/{os.getppid()}/stat") as stat:
                    os.kill(int(stat.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
            time.sleep(60)
        update(self, action)

    runtime.Runner._update = update_or_kill
    runtime.run(me)
