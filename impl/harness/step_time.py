"""Times one step of several systems in one process group, alternating between them.

Machines are noisy: only numbers of one repetition are compared.  A repetition visits every system, in an order that
rotates, and runs at least two steps of each: the first brings it into the state that training would have it in (the
parameters of the step before still on their way), the others are timed.  All systems start from the same weights and
see the same data, so their losses are those of one training run and are compared too.
"""

from __future__ import annotations

import gc
import importlib
import statistics
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from impl.canzona.audit import Audit
from impl.canzona.engine import Engine
from impl.canzona.mesh import Mesh
from impl.errors import ConfigError
from impl.harness.progress import Progress
from impl.harness.record import append_row
from impl.harness.results import engine_facts
from impl.harness.setup import device_type, prepare
from impl.harness.step_time_spec import StepTimeSpec, System
from impl.harness.training import Trainer, build
from impl.harness.worker import Rank

Row = dict[str, Any]
LIVE = "baselines.nv_layerwise_live"
"""The adapter of Megatron's own optimizer: a plug-in, found by name because ``impl`` does not depend on baselines."""


@dataclass(frozen=True)
class Contestant:
    """One system under test with a model and engine of its own, on the same data as the others."""

    system: System
    trainer: Trainer
    _losses: list[torch.Tensor] = field(default_factory=list)

    def step(self, tokens: torch.Tensor) -> dict[str, float]:
        """Run one step on ``tokens [batch / dp, sequence + 1]``; return seconds by phase.

        Ends with the new parameters in flight, as in training.
        """
        engine = self.trainer.engine
        engine.begin_step()
        self._losses.append(self.trainer.accumulate(tokens))
        engine.step(self.trainer.spec.lr)
        seconds = engine.clock.seconds()
        forward_backward = sum(seconds.get(phase, 0.0) for phase in ("forward", "backward", "grad_reduce"))
        return {**seconds, "forward_backward": forward_backward}

    def losses(self) -> list[float]:
        """Return the mean losses of the steps since the last call, equal on every rank; all must call."""
        mesh, local = self.trainer.mesh, torch.stack(self._losses)
        self._losses.clear()
        shared = local if mesh.tp_rank == 0 else torch.zeros_like(local)  # TP ranks hold the same loss
        dist.all_reduce(shared, group=mesh.world_group)
        return (shared / mesh.dp).tolist()

    def audited_step(self, tokens: torch.Tensor) -> None:
        """Run one slow step in which every collective is seen, whoever sends it."""
        engine = self.trainer.engine
        audit = Audit.of_mesh(self.trainer.mesh, lambda: engine.clock.phase)
        with audit:
            self.step(tokens)
        engine.synchronize()
        self.trainer.audit = audit.result()


def run(me: Rank) -> None:
    """Measure as this rank of the job in ``me.folder``; rank 0 writes a row per repetition and system, and the record.

    Seconds are those of the slowest rank, the mean over the timed steps of a repetition.
    """
    spec: StepTimeSpec = me.settings(StepTimeSpec)
    base = spec.base
    device = me.join(device_type(base.runtime.device, me.local_ranks), base.runtime)
    mesh = Mesh.create(base.dp, base.tp, device, timeout=timedelta(seconds=base.runtime.collective_timeout_s))
    contestants = [contestant(spec, system, mesh, me) for system in spec.systems]
    progress = None
    if me.terminal is not None:
        samples = base.batch * len(spec.systems) * (1 + spec.timed_steps)
        progress = Progress(me.terminal, spec.repetitions, base.runtime.heartbeat_s, "repetition", samples)
    me.folder.metrics.unlink(missing_ok=True)  # a repetition means nothing beside those of another process
    for one in contestants:
        one.audited_step(contestants[0].trainer.stream.batch(1).to(device))
    gc.collect()
    gc.disable()  # a collection inside a timed step would be charged to whichever system it falls on
    losses: list[float] = []
    for repetition in range(-spec.warmup, spec.repetitions):
        tokens = contestants[0].trainer.stream.batch(repetition + spec.warmup + 2).to(device)
        turn = repetition % len(contestants)
        for one in contestants[turn:] + contestants[:turn]:
            dist.barrier(group=mesh.world_group)
            one.step(tokens)
            timed = [slowest(one.step(tokens), mesh) for _ in range(spec.timed_steps)]
            one.trainer.engine.synchronize()
            losses = one.losses()
            if repetition >= 0 and me.rank == 0:
                seconds = {phase: statistics.fmean(t[phase] for t in timed) for phase in timed[0]}
                last = 1 + (repetition + spec.warmup + 1) * (1 + spec.timed_steps)  # after the audited one
                row = {"repetition": repetition, "system": one.system.id, "seconds": seconds}
                row |= {"losses": losses, "last_step": last}
                append_row(me.folder.metrics, {"event": "step_time", "step": repetition, **row})
        if progress is not None and repetition >= 0:
            progress.advance(repetition + 1, f"loss {losses[-1]:.4f}  ")
    gc.enable()
    result = {"systems": {one.system.id: facts(one, compare=spec.compare_parameters) for one in contestants}}
    if me.rank == 0:
        me.folder.finish(spec, "done", result=result)
    dist.barrier(group=mesh.world_group)
    dist.destroy_process_group()


def contestant(spec: StepTimeSpec, system: System, mesh: Mesh, me: Rank) -> Contestant:
    """Build one system; every rank of ``mesh`` must call."""
    settings = system.run_spec(spec.base)
    engine = importlib.import_module(LIVE).LiveLayerWise if system.live else Engine
    return Contestant(system, build(settings, prepare(settings), mesh, me.folder, None, engine))


def check_systems(spec: StepTimeSpec) -> None:
    """Raise :class:`ConfigError` for a system that cannot run; no process is needed."""
    base = spec.base
    if base.resume_from is not None:
        raise ConfigError("a timing job starts from fresh weights: leave resume_from out")
    if any(s.live for s in spec.systems) and (base.plan.split != "none" or base.offload_state):
        raise ConfigError("Megatron's own optimizer (live) takes neither plan.split nor offload_state: leave them out")
    for system in spec.systems:
        prepare(system.run_spec(spec.base))
        if system.live and (system.strategy, system.nv_version) != ("nv-layerwise", "ping-pong"):
            raise ConfigError(f"system {system.id}: live needs strategy nv-layerwise with nv_version ping-pong")


def slowest(seconds: dict[str, float], mesh: Mesh) -> dict[str, float]:
    """Return the largest value of each phase over all ranks, which must all call with the same phases."""
    names = sorted(seconds)
    values = torch.tensor([seconds[name] for name in names], dtype=torch.float64, device=mesh.device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=mesh.world_group)
    return dict(zip(names, values.tolist(), strict=True))


def facts(one: Contestant, *, compare: bool) -> dict[str, Any]:
    """Return what a system's ranks counted, and its plan; every rank must call.

    compare: add the digest of the parameters; raises ``RuntimeError`` if two replicas differ.
    """
    engine = one.trainer.engine
    found = engine_facts(engine, one.trainer.audit)
    digest = {"params_digest": one.trainer.params_digest()} if compare else {}
    return {**found, "nv_version": engine.plan.version, "plan": one.trainer.setup.report, **digest}
