"""The real pipeline: one process per stage and replica, which works through the actions of its stage.

What a process computes depends only on what it receives, never on when, so timing changes no number: weights, losses
and versions are those of the simulator.  The newest weights are evaluated right after an update, each stage on the
activations of the stage before; that costs time and changes nothing either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from impl.harness.data import TokenStream
from impl.harness.pipeline_checkpoint import Checkpoints, agreed, newest
from impl.harness.pipeline_run import (
    PipelineSetup,
    Recorder,
    conclude,
    is_evaluated,
    open_replica,
    prepare,
    stage_options,
)
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.progress import Progress
from impl.harness.record import cut_rows
from impl.harness.schedule import learning_rate
from impl.harness.setup import device_type
from impl.harness.worker import Rank
from impl.rotation.links import Channel, Place, connect, received_before
from impl.rotation.outcome import collect
from impl.rotation.resume import done_by, messages
from impl.rotation.schedule import Action, Schedule
from impl.rotation.simulator import HELDOUT_CHUNK, Microbatches
from impl.rotation.stage import Stage


class Report(Protocol):
    """Where the first and the last stage of replica 0 tell how the run goes."""

    def step(self, update: int, loss: float) -> None:
        """The last stage has done 1-based ``update``; ``loss`` is its mean training loss."""
        ...

    def heldout(self, update: int, loss: float) -> None:
        """The last stage has the held-out loss of all stages' weights after ``update``."""
        ...

    def passed(self, update: int) -> None:
        """The first stage, and so every stage, has done ``update``."""
        ...


@dataclass(frozen=True)
class _RecordedProgress:
    recorder: Recorder
    progress: Progress | None

    def step(self, update: int, loss: float) -> None:
        self.recorder.step(update, loss)

    def heldout(self, update: int, loss: float) -> None:
        self.recorder.heldout(update, loss)

    def passed(self, update: int) -> None:
        if self.progress is not None:
            self.progress.advance(update, lambda: self.recorder.written_loss(update))


def run(me: Rank) -> None:
    """Train as this rank of the pipeline run in ``me.folder``, from its last checkpoint if it has one.

    Rank 0 writes the manifest.
    """
    spec: PipelineSpec = me.settings(PipelineSpec)
    setup = prepare(spec)
    first = newest(me.folder) if me.rank == 0 else 0
    if me.rank == 0:
        cut_rows(me.folder.metrics, first)  # while the others wait in join
    device = me.join(device_type(spec.process.device, me.local_ranks), spec.process)
    progress = None
    if me.terminal is not None:
        progress = Progress(me.terminal, spec.steps, spec.process.heartbeat_s, "update", spec.batch)
    runner = build(spec, setup, device, _RecordedProgress(Recorder(spec, me.folder.metrics), progress))
    checkpoints = Checkpoints(spec, me.folder, [runner.stage], runner.microbatches)
    first = agreed(first, device)
    if first:
        runner.resume(first, checkpoints)
        if progress is not None:
            progress.line(f"resuming after update {first}")
    diverged = not runner.run(checkpoints)
    facts = runner.facts(diverged=diverged)
    if me.rank == 0:
        conclude(spec, setup, me.folder, {**facts, "resumed_from": first or None})
    dist.barrier()
    dist.destroy_process_group()


def build(
    spec: PipelineSpec,
    setup: PipelineSetup,
    device: torch.device,
    report: Report,
    before: Callable[[Action], None] | None = None,
) -> Runner:
    """Return the runner of this rank, with fresh weights; every rank of the default process group must call.

    before: called ahead of every action; whatever time it takes changes no number.
    """
    place = connect(spec.stages, spec.replicas, device, timedelta(seconds=spec.process.collective_timeout_s))
    stage = Stage(
        setup.model,
        setup.parts[place.stage],
        place.stage,
        setup.schedule,
        setup.method,
        place.mesh,
        lambda update: learning_rate(spec.schedule, spec.lr, update, spec.steps),
        seed=spec.seed,
        options=stage_options(spec),
    )
    stream = open_replica(spec, setup, place.replica) if stage.needs_tokens else None
    return Runner(spec, setup, stage, place, stream, report, before or (lambda _: None))


class Runner:
    """Works through the actions of one stage."""

    def __init__(
        self,
        spec: PipelineSpec,
        setup: PipelineSetup,
        stage: Stage,
        place: Place,
        stream: TokenStream | None,
        report: Report,
        before: Callable[[Action], None],
    ) -> None:
        self.spec, self.setup, self.stage, self.place = spec, setup, stage, place
        self._stream, self._report, self._before = stream, report, before
        schedule = setup.schedule
        self._actions = schedule.actions[place.stage]
        self.microbatches = Microbatches(stream, schedule.per_update) if stream is not None else None
        self._shares: dict[int, float] = {}
        self._losses: dict[int, Tensor] = {}
        self._done_losses: list[float] = []
        self._peer_has_gradients = _acknowledged(schedule, place.stage - 1, "B", "F")
        self._peer_has_activations = _acknowledged(schedule, place.stage + 1, "F", "B")

    def resume(self, update: int, checkpoints: Checkpoints) -> None:
        """Go on from the checkpoint after 1-based ``update``, before any action; every rank must call."""
        checkpoints.load(update)
        for channel, neighbour, kind in (
            (self.place.forward_out, self.place.stage + 1, "F"),
            (self.place.backward_out, self.place.stage - 1, "B"),
        ):
            if channel is not None:
                done = done_by(self.setup.schedule, neighbour, update)
                channel.start_at(sum(action.kind == kind for action in done))
        for hidden in messages(self.stage).values():
            assert self.place.forward_out is not None, "the last stage sends no hidden states"
            self.place.forward_out.send(hidden)

    def run(self, checkpoints: Checkpoints | None = None) -> bool:
        """Run all actions; return False if a training loss was not finite, where every stage stops."""
        for action in self._actions[len(self.stage.log) :]:
            self._before(action)
            if action.kind == "F":
                self._forward(action)
            elif action.kind == "B":
                if not self._backward(action):
                    return False
            else:
                self._update(action)
                if checkpoints is not None and checkpoints.due(action.number + 1):
                    checkpoints.save(action.number + 1)
        for channel in (self.place.forward_out, self.place.backward_out, self.place.heldout_out):
            if channel is not None:
                channel.settle()
        return True

    def _forward(self, action: Action) -> None:
        number, hidden, tokens = action.number, None, None
        if self.place.forward_in is not None:
            hidden, _ = self.place.forward_in.receive(self._shape(self._rows(number)))
            _settle(self.place.backward_out, self._peer_has_gradients[number])
        if self.microbatches is not None:
            tokens, self._shares[number] = self.microbatches(number)
            tokens = tokens.to(self.place.mesh.device)
        output = self.stage.forward(number, hidden, action.version, tokens)
        if self.place.forward_out is None:
            self._losses[number] = output
        else:
            self.place.forward_out.send(output)

    def _backward(self, action: Action) -> bool:
        """Run a backward and send its gradient on; return False if the pipeline stops at this microbatch."""
        number, share = action.number, self._shares.pop(action.number, 1.0)
        if self.place.backward_in is None:
            gradient, stop = None, not self._take_loss(number, share)
        else:
            gradient, stop = self.place.backward_in.receive(self._shape(self._rows(number)))
            _settle(self.place.forward_out, self._peer_has_activations[number])
        if stop:
            if self.place.backward_out is not None:
                nothing = torch.zeros(self._shape(self._rows(number)), device=self.place.mesh.device)
                self.place.backward_out.send(nothing, stop=True)
            return False
        out = self.stage.backward(number, gradient, action.version, share)
        if self.place.backward_out is not None:
            assert out is not None, "only the first stage has no input gradient"
            self.place.backward_out.send(out)
        return True

    def _take_loss(self, number: int, share: float) -> bool:
        """Count the loss of a microbatch, the mean over replicas; return whether it is finite, and report if not."""
        loss = self._losses.pop(number).double()
        if self.spec.replicas > 1:
            dist.all_reduce(loss, group=self.place.mesh.dp_group)
            loss /= self.spec.replicas
        self._done_losses.append(loss.item() * share)
        if math.isfinite(self._done_losses[-1]):
            return True
        if self.place.replica == 0:
            self._report.step(self.setup.schedule.update_of(number) + 1, self._done_losses[-1])
        return False

    def _update(self, action: Action) -> None:
        update = action.number + 1
        self.stage.update(action.number)
        if self.place.replica != 0:
            self._done_losses.clear()
            return
        if self.place.forward_out is None:
            self._report.step(update, math.fsum(self._done_losses))
            self._done_losses.clear()
        if is_evaluated(self.spec, update):
            self._evaluate(update)
        if self.place.stage == 0:
            self._report.passed(update)

    def _evaluate(self, update: int) -> None:
        """Take this stage's part in the held-out loss of the weights after ``update``, which are its newest."""
        total, sums = self.spec.data.heldout_sequences, []
        heldout = self._stream.heldout() if self._stream is not None else None
        for start in range(0, total, HELDOUT_CHUNK):
            rows, hidden, tokens = min(HELDOUT_CHUNK, total - start), None, None
            if self.place.heldout_in is not None:
                hidden, _ = self.place.heldout_in.receive(self._shape(rows))
            if heldout is not None:
                tokens = heldout[start : start + rows].to(self.place.mesh.device)
            output = self.stage.evaluate(hidden, tokens)
            if self.place.heldout_out is None:
                sums.append((output.double() * rows).item())
            else:
                self.place.heldout_out.send(output)
        if self.place.heldout_out is None:
            self._report.heldout(update, math.fsum(sums) / total)
        else:
            self.place.heldout_out.settle()  # the next stage has been waiting for them

    def _rows(self, number: int) -> int:
        """Return the sequences of a microbatch on one replica."""
        whole, parts = self.spec.batch // self.spec.replicas, self.setup.schedule.per_update
        return whole // parts + (number % parts < whole % parts)

    def _shape(self, rows: int) -> tuple[int, int, int]:
        return self.spec.sequence, rows, self.setup.model.arch.hidden_size

    def facts(self, *, diverged: bool) -> dict[str, Any]:
        """Return on rank 0 what all stages know at the end, elsewhere nothing; every rank must call."""
        return collect(self.stage, self.place, self.setup.parts, diverged=diverged)


def _acknowledged(schedule: Schedule, neighbour: int, counted: Any, mark: Any) -> dict[int, int]:
    if not 0 <= neighbour < schedule.stages:
        return {}
    return received_before(schedule.actions[neighbour], counted, mark)


def _settle(channel: Channel | None, count: int) -> None:
    if channel is not None:
        channel.settle(count)
