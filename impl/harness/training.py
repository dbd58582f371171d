"""The training loop of one rank."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.canzona.audit import Audit
from impl.canzona.collectives import same_on_all_ranks
from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.mesh import Mesh
from impl.harness import results, resuming, step_folders
from impl.harness.checkpoint import Checkpoints, Meta
from impl.harness.data import TokenStream, open_stream
from impl.harness.progress import Progress
from impl.harness.record import RunFolder, append_row, cut_rows
from impl.harness.schedule import learning_rate
from impl.harness.setup import Setup, device_type, prepare
from impl.harness.spec import RunSpec
from impl.harness.worker import Rank
from impl.models import gpt, weights
from impl.models.gpt import PortableGPT
from impl.optimizers import routing

HELDOUT_CHUNK = 8
"""Most sequences of one held-out forward; never more than a microbatch, which is known to fit."""


def train(me: Rank) -> None:
    """Train as this rank of the run in ``me.folder``, from its last checkpoint if it has one; rank 0 writes the record.

    A loss or gradient norm that is not finite ends the run with status ``diverged`` on all ranks.
    """
    spec: RunSpec = me.settings(RunSpec)
    setup = prepare(spec)
    device = me.join(device_type(spec.runtime.device, me.local_ranks), spec.runtime)
    mesh = Mesh.create(spec.dp, spec.tp, device, timeout=timedelta(seconds=spec.runtime.collective_timeout_s))
    progress = Progress(me.terminal, spec.steps, spec.runtime.heartbeat_s) if me.terminal is not None else None
    trainer = build(spec, setup, mesh, me.folder, progress)
    trainer.checkpoints = Checkpoints.of_run(me.folder.checkpoints, setup.model, mesh)
    first = trainer.resume() + 1
    trainer.announce(first)
    status = trainer.run(first)
    trainer.checkpoints.wait()
    result = trainer.result(status, first - 1)
    if me.rank == 0:
        me.folder.finish(spec, status, result=result)
        trainer.say(results.summary(status, result, me.folder.manifest_path))
    dist.barrier(group=mesh.world_group)
    dist.destroy_process_group()


def build(
    spec: RunSpec,
    setup: Setup,
    mesh: Mesh,
    folder: RunFolder,
    progress: Progress | None,
    engine_class: type[Engine] = Engine,
) -> Trainer:
    """Return the trainer of this rank with fresh weights; all ranks of ``mesh`` must call."""
    model = gpt.build_model(setup.model, mesh.tp_group, dtype=getattr(torch, spec.dtype), device=mesh.device)
    if spec.init_from is None:
        weights.initialize(model, setup.model, spec.seed, mesh.tp_rank, mesh.tp)
    else:
        weights.load_hf(spec.init_from, model, setup.model, mesh.tp_rank, mesh.tp)
    frozen = {route.name for route in setup.routes if route.optimizer is None}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    options = EngineOptions(
        reduction=spec.reduction, clip=spec.clip, weight_decay=spec.weight_decay, offload=spec.offload_state
    )
    engine = engine_class(model, setup.plan, setup.optimizers, mesh, options)
    stream = open_stream(
        spec.data,
        sequence=spec.sequence,
        batch=spec.batch,
        dp_rank=mesh.dp_rank,
        dp=mesh.dp,
        seed=spec.seed,
        vocabulary=setup.model.arch.vocab_size,
    )
    return Trainer(spec, setup, mesh, model, engine, stream, folder, progress)


@dataclass
class Trainer:
    """One rank's model, engine and data.  Every rank calls the methods in the same order.

    progress: on rank 0 only, which also writes ``metrics.jsonl``.
    audit: all collectives of the first step that this process ran, by phase.
    checkpoints: None where the run has none.
    """

    spec: RunSpec
    setup: Setup
    mesh: Mesh
    model: PortableGPT
    engine: Engine
    stream: TokenStream
    folder: RunFolder
    progress: Progress | None
    audit: dict[str, Any] | None = None
    checkpoints: Checkpoints | None = None

    @property
    def rank(self) -> int:
        """Number of this rank."""
        return self.mesh.rank

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.progress is not None:
            self.progress.line(text)

    def announce(self, first: int) -> None:
        """Say what is about to run, and what a user should know about the plan."""
        spec, report = self.spec, self.setup.report
        parameters = self.setup.model.parameters(spec.tp)
        name = spec.strategy + (f" {report['version']}" if report["version"] else "")
        self.say(f"{spec.model}, {name}, DP {spec.dp} x TP {spec.tp} on {self.mesh.device.type}, {spec.steps} steps")
        self.say(routing.report(parameters, self.setup.routes).partition("\n\n")[0])
        for warning in report["warnings"]:
            self.say(f"note: {warning}")
        if first > 1:
            self.say(f"resuming after step {first - 1}")

    def resume(self) -> int:
        """Load the run's last checkpoint or else that of ``resume_from``; return the number of steps that are done."""
        assert self.checkpoints is not None
        found = [self._start() if self.rank == 0 else None]
        # rank 0 decides: file systems of other machines may lag behind
        dist.broadcast_object_list(found, group=self.checkpoints.group, group_src=0)
        if found[0] is None:
            meta = None
        elif isinstance(found[0], int):
            meta = self.checkpoints.load_own(found[0], self.engine, self.spec.digest)
        else:
            advice = f"give another resume_from than {self.spec.resume_from}"
            meta = self.checkpoints.load(Path(found[0]), self.engine, advice)
        if self.rank == 0:
            cut_rows(self.folder.metrics, meta.step if meta else 0)
        if meta is None:
            return 0
        self.stream.load_state_dict(meta.data)
        if isinstance(found[0], str):
            self.say(f"going on from {found[0]} ({meta.origin})")
            if self.spec.checkpoint_every:
                self.save(meta.step)  # from here on the other run is not needed
        return meta.step

    def _start(self) -> int | str | None:
        """Return the step of the run's own newest checkpoint, or else the folder that ``resume_from`` means."""
        own = step_folders.latest(self.folder.checkpoints)
        if own is None and self.spec.resume_from is not None:
            return str(resuming.find(self.spec.resume_from))
        return own

    def run(self, first: int) -> str:
        """Run the steps from ``first`` on; return ``done`` or ``diverged``."""
        spec = self.spec
        for step in range(first, spec.steps + 1):
            finite = self.step(step, audited=step == first)
            if not finite:
                return "diverged"
            if step == spec.steps or (spec.eval_every and step % spec.eval_every == 0):
                loss = self.heldout_loss()
                self.write({"event": "heldout", "step": step, "loss": loss})
                if not math.isfinite(loss):
                    return "diverged"
                self.say(f"step {step}/{spec.steps}  held-out loss {loss:.4f}")
            if spec.checkpoint_every and step % spec.checkpoint_every == 0:
                self.save(step)
        return "done"

    def step(self, step: int, *, audited: bool) -> bool:
        """Run one step and write its rows; return whether training can go on."""
        spec, engine = self.spec, self.engine
        tokens = self.stream.batch(step)
        gpt.check_tokens(tokens, self.setup.model)
        engine.begin_step()
        lr = learning_rate(spec.schedule, spec.lr, step, spec.steps)
        audit = Audit.of_mesh(self.mesh, lambda: engine.clock.phase) if audited else None
        with audit or nullcontext():
            local = self.accumulate(tokens.to(self.mesh.device))
            measured = spec.health_every > 0 and step % spec.health_every == 0
            info = engine.step(lr, measure=measured)
        if audit is not None:
            self.audit = audit.result()
        loss = self.mean_loss(local)
        seconds = engine.clock.seconds()
        speed = spec.batch * spec.sequence / seconds["iteration"]
        row = {"event": "step", "step": step, "loss": loss, "lr": lr, "grad_norm": info.grad_norm}
        if info.skipped:
            row["not_finite"] = list(info.not_finite)
        self.write({**row, "tokens_per_s": speed, "seconds": seconds, "slowed": audited or measured})
        if self.progress is not None:
            self.progress.step(step, loss, speed / spec.sequence, speed)
        self.report_health(step, engine.worst_health())
        if not info.skipped:
            return math.isfinite(loss)
        self.say(f"step {step} skipped: the gradient of {info.not_finite[0]} is not finite")
        return engine.skips <= spec.max_skips

    def report_health(self, step: int, worst: dict[str, float]) -> None:
        """Write what the optimizers measured in ``step``, if they did, and counted so far; warn of what is not healthy.

        Whatever they count is something that should not happen.
        """
        if worst:
            counters = self.engine.counters()
            counted = [f"{name} is {count} so far" for name, count in counters.items() if count]
            alarms = self.engine.alarms(worst) + counted
            self.write({"event": "health", "step": step, "worst": worst, "counters": counters, "alarms": alarms})
            for alarm in alarms:
                self.say(f"alarm at step {step}: {alarm}")

    def accumulate(self, tokens: Tensor) -> Tensor:
        """Run forward and backward of all of ``tokens [batch / dp, sequence + 1]``; return this rank's mean loss."""
        parts = tokens.split(self.spec.local_batch)
        total = torch.zeros((), dtype=torch.float64, device=tokens.device)
        for number, part in enumerate(parts):
            with self.engine.clock("forward"):
                loss = gpt.loss(self.model, part)
            with self.engine.microbatch(last=number == len(parts) - 1):
                (loss / len(parts)).backward()
            total += loss.detach().double() / len(parts)
        return total

    def mean_loss(self, local: Tensor) -> float:
        """Return the mean of the DP ranks' ``local`` loss, equal on every rank."""
        shared = local if self.mesh.tp_rank == 0 else torch.zeros_like(local)  # TP ranks hold the same loss
        self.engine.world.all_reduce(shared, "loss").wait()
        return shared.item() / self.mesh.dp

    @torch.no_grad()
    def heldout_loss(self) -> float:
        """Return the newest weights' mean loss on the held-out set, equal on every rank.

        Chunks are dealt to DP ranks in turn and summed in their own order in float64, so the result does not depend
        on the number of ranks (as long as microbatches hold at least ``HELDOUT_CHUNK`` sequences).
        """
        self.engine.synchronize()
        heldout = self.stream.heldout()
        gpt.check_tokens(heldout, self.setup.model)
        chunks = heldout.split(min(HELDOUT_CHUNK, self.spec.local_batch))
        sums = torch.zeros(len(chunks), dtype=torch.float64, device=self.mesh.device)
        for number in range(self.mesh.dp_rank, len(chunks), self.mesh.dp):
            chunk = chunks[number].to(self.mesh.device)
            sums[number] = gpt.loss(self.model, chunk).double() * len(chunk)
        if self.mesh.tp_rank != 0:
            sums.zero_()
        dist.all_reduce(sums, group=self.mesh.world_group)
        return math.fsum(sums.tolist()) / len(heldout)

    def save(self, step: int) -> None:
        """Start to write a checkpoint, which goes on while the training does."""
        assert self.checkpoints is not None
        spec = self.spec
        meta = Meta(step, spec.digest, self.setup.plan.digest, spec.resolved(), self.stream.state_dict())
        self.checkpoints.save(self.engine, meta)

    def write(self, row: dict[str, Any]) -> None:
        """Append a row to ``metrics.jsonl`` on rank 0."""
        if self.rank == 0:
            append_row(self.folder.metrics, row)

    def params_digest(self) -> str:
        """Return the digest of the whole parameters; raises ``RuntimeError`` if two replicas differ."""
        self.engine.synchronize()
        whole = weights.whole_parameters(self.model, self.setup.model, self.mesh.tp_group)
        digest = weights.params_digest(self.setup.model, whole)
        if not same_on_all_ranks(digest, self.mesh.world_group, self.mesh.device):
            raise RuntimeError("the replicas of the parameters differ between DP ranks at the end of the run")
        return digest

    def result(self, status: str, resumed_from: int) -> dict[str, Any]:
        """Return the run's result as plain data; seconds are rank 0's, bytes the largest over ranks."""
        digest = self.params_digest() if status == "done" else None
        facts = results.engine_facts(self.engine, self.audit) | {"counters": self.engine.counters()}
        if self.rank != 0:
            return {}
        report = self.setup.report
        return {
            **results.from_rows(self.folder.metrics),
            "params_digest": digest,
            "resumed_from": resumed_from or None,
            **facts,
            "plan": report,
            "routing": [[r.name, r.optimizer, r.reason] for r in self.setup.routes],
            "over_capacity": report["over_capacity"],
        }
