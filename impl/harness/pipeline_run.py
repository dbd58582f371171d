"""One pipeline run, from its settings to its record: checks, execution, result."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from impl.canzona.mesh import Mesh
from impl.errors import ConfigError
from impl.harness import data, launch
from impl.harness.data import TokenStream
from impl.harness.pipeline_checkpoint import Checkpoints, newest
from impl.harness.pipeline_results import result
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.progress import Progress
from impl.harness.record import RunFolder, append_row, cut_rows, write_atomically
from impl.harness.run_state import tail
from impl.harness.schedule import learning_rate
from impl.harness.setup import device_type
from impl.models import catalogue
from impl.models.catalogue import ModelConfig, Part
from impl.rotation.method import Method, StageContext, contexts, create_method
from impl.rotation.outcome import added
from impl.rotation.partition import partition
from impl.rotation.rules import build
from impl.rotation.schedule import Schedule
from impl.rotation.simulator import Microbatches, UpdateRow, build_stages, simulate
from impl.rotation.stage_parts import StageOptions

PROCESSES = "impl.rotation.runtime:run"
VERSIONS = "versions.json"


@dataclass(frozen=True)
class PipelineSetup:
    """What settings decide, without a process group: the same on every rank.

    contexts, parts: of every stage.  microbatches: of an update.
    """

    model: ModelConfig
    method: Method
    schedule: Schedule
    contexts: tuple[StageContext, ...]
    parts: tuple[Part, ...]
    microbatches: int


def prepare(spec: PipelineSpec) -> PipelineSetup:
    """Return the setup of ``spec``; raises :class:`ConfigError` for anything in it that cannot work."""
    model = catalogue.load(spec.model, spec.layers)
    method = create_method(spec.method, spec.method_settings)
    parts = partition(model, spec.stages, spec.layer_counts)
    mode = spec.mode or method.modes[0]
    if mode not in method.modes:
        raise ConfigError(f"{spec.method} runs in mode {' or '.join(method.modes)}, not {mode}")
    synchronous = mode == "sync"
    microbatches = spec.microbatches or (spec.stages if synchronous or mode == "2bw" else 1)
    if spec.batch % spec.replicas:
        raise ConfigError(f"batch {spec.batch} is not a multiple of replicas ({spec.replicas}): change one of them")
    if spec.batch // spec.replicas < microbatches:
        raise ConfigError(
            f"{spec.batch // spec.replicas} sequences cannot be cut into {microbatches} microbatches: raise batch"
        )
    if synchronous and spec.drain_every:
        raise ConfigError(f"{spec.method} drains before every update anyway: leave drain_every out")
    schedule = build(
        method.schedule, spec.stages, _segments(spec), mode=None if synchronous else mode, per_update=microbatches
    )
    stage_options(spec).check()
    places = contexts(schedule)
    for place in places:
        method.check(place)
        method.matrix_optimizer(place)
        method.elementwise_optimizer(place)
    return PipelineSetup(model, method, schedule, places, parts, microbatches)


def _segments(spec: PipelineSpec) -> list[int]:
    """Return the updates between one drain of the pipeline and the next."""
    length = spec.drain_every or spec.steps
    return [min(length, spec.steps - begin) for begin in range(0, spec.steps, length)]


def check(spec: PipelineSpec, *, local_ranks: int) -> PipelineSetup:
    """Return :func:`prepare`'s setup after checking data and devices too.

    local_ranks: how many processes this machine will run.
    """
    setup = prepare(spec)
    longest = setup.model.arch.max_position_embeddings
    if spec.sequence > longest:
        raise ConfigError(f"sequence {spec.sequence} is longer than {spec.model}'s {longest} positions")
    if spec.runtime == "simulator" and spec.replicas > 1:
        raise ConfigError("the simulator computes one replica of each stage: use --runtime processes for more")
    device_type(spec.process.device, local_ranks)
    data.check(
        spec.data,
        sequence=spec.sequence,
        batch=spec.batch,
        dp=spec.replicas,
        vocabulary=setup.model.arch.vocab_size,
    )
    return setup


def stage_options(spec: PipelineSpec) -> StageOptions:
    """Return the settings of every stage."""
    return StageOptions(
        recompute=spec.recompute, stash_on_cpu=spec.stash_on_cpu, clip=spec.clip, weight_decay=spec.weight_decay
    )


def open_replica(spec: PipelineSpec, setup: PipelineSetup, replica: int) -> TokenStream:
    """Return the data of replica number ``replica`` of the stages that read tokens."""
    return data.open_stream(
        spec.data,
        sequence=spec.sequence,
        batch=spec.batch,
        dp_rank=replica,
        dp=spec.replicas,
        seed=spec.seed,
        vocabulary=setup.model.arch.vocab_size,
    )


class Recorder:
    """Writes the rows of a run's ``metrics.jsonl``; one process of the run has it."""

    def __init__(self, spec: PipelineSpec, metrics: Path) -> None:
        self._spec, self._metrics, self._started = spec, metrics, time.perf_counter()

    def step(self, update: int, loss: float) -> None:
        """Write the row of 1-based ``update``; ``loss`` is the mean of its microbatches, at the weights they saw.

        ``elapsed`` is the time in seconds since the start, or since the run was resumed.
        """
        lr = learning_rate(self._spec.schedule, self._spec.lr, update, self._spec.steps)
        elapsed = time.perf_counter() - self._started
        append_row(self._metrics, {"event": "step", "step": update, "loss": loss, "lr": lr, "elapsed": elapsed})

    def heldout(self, update: int, loss: float) -> None:
        """Write the held-out loss of the newest weights of all stages after ``update``."""
        append_row(self._metrics, {"event": "heldout", "step": update, "loss": loss})

    def written_loss(self, update: int) -> str:
        """Return what a progress line says of the loss of ``update``, which another process may have written.

        Empty if it is not seen here yet.
        """
        rows = (row for row in tail(self._metrics) if row.get("event") == "step" and row.get("step") == update)
        return next((f"loss {row['loss']:.4f}  " for row in rows if row.get("loss") is not None), "")


def is_evaluated(spec: PipelineSpec, update: int) -> bool:
    """Return whether the newest weights are evaluated after 1-based ``update``; ``eval_every`` 0 is never."""
    return spec.eval_every > 0 and (update == spec.steps or update % spec.eval_every == 0)


def execute(spec: PipelineSpec, out: Path, *, wait: bool = False) -> int:
    """Run ``spec`` in the folder ``out``, which then holds its record; return the exit code as :mod:`launch` does.

    wait: as in :meth:`RunFolder.claim`.  Raises :class:`ConfigError` before anything is started.
    """
    if spec.runtime == "processes":
        return launch.execute(PROCESSES, spec, out, ranks=spec.world_size, runtime=spec.process, wait=wait)
    return launch.execute_here(lambda run: _simulate(spec, run), spec, out, wait=wait)


def _simulate(spec: PipelineSpec, run: RunFolder) -> None:
    """Run all stages in this process and write the record."""
    setup, recorder = prepare(spec), Recorder(spec, run.metrics)
    progress = Progress(sys.stdout, spec.steps, spec.process.heartbeat_s, "update", spec.batch)
    with one_process(spec) as device:
        stages = build_stages(
            setup.model,
            setup.parts,
            setup.schedule,
            setup.method,
            Mesh.create(1, 1, device),
            lambda update: learning_rate(spec.schedule, spec.lr, update, spec.steps),
            seed=spec.seed,
            options=stage_options(spec),
        )
        stream = open_replica(spec, setup, 0)
        microbatches = Microbatches(stream, setup.schedule.per_update)
        checkpoints = Checkpoints(spec, run, stages, microbatches)

        def report(row: UpdateRow) -> None:
            recorder.step(row.step, row.loss)
            if row.heldout is not None:
                recorder.heldout(row.step, row.heldout)
            progress.advance(row.step, f"loss {row.loss:.4f}  ")
            if checkpoints.due(row.step) and row.finite:
                checkpoints.save(row.step)

        first = newest(run)
        cut_rows(run.metrics, first)
        if first:
            checkpoints.load(first)
            progress.line(f"resuming after update {first}")
        found = simulate(
            stages,
            setup.schedule,
            stream,
            eval_every=spec.eval_every,
            report=report,
            microbatches=microbatches,
        )
        counters = added([stage.engine.counters() for stage in stages])
    facts = {
        "diverged": found.diverged,
        "params_digest": found.params_digest,
        "resumed_from": first or None,
        "peak_stash_versions": list(found.peak_versions),
        "skipped_updates": [stage.skipped_updates for stage in stages],
        "counters": counters,
        "versions": [[list(e[1:]) for e in found.log if e.stage == stage] for stage in range(spec.stages)],
    }
    conclude(spec, setup, run, facts)


@contextlib.contextmanager
def one_process(spec: PipelineSpec) -> Iterator[torch.device]:
    """Make this process a world of one rank that computes like a rank process, and yield its device."""
    device = torch.device(device_type(spec.process.device, 1))
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(spec.process.threads)
    torch.use_deterministic_algorithms(spec.process.deterministic)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=HashStore(), rank=0, world_size=1)
    try:
        yield device
    finally:
        dist.destroy_process_group()
        torch.use_deterministic_algorithms(deterministic)
        torch.set_num_threads(threads)


def conclude(spec: PipelineSpec, setup: PipelineSetup, run: RunFolder, facts: dict[str, Any]) -> None:
    """Write ``versions.json`` and the manifest from the rows and what the stages counted.

    facts: ``diverged``, ``params_digest``, ``resumed_from``, ``peak_stash_versions``, ``skipped_updates`` and
    ``counters`` of the optimizers, and ``versions``, which get a file of their own: ``[kind, number, version]`` of
    every action of every stage.
    """
    facts = dict(facts)
    diverged = facts.pop("diverged")
    write_atomically(run.path / VERSIONS, json.dumps(facts.pop("versions")))
    planned = {
        "staleness": [context.staleness for context in setup.contexts],
        "mode": setup.schedule.mode,
        "microbatches": setup.microbatches,
        "layers": [part.layers for part in setup.parts],
    }
    found = result(spec.target, run.metrics, {**planned, **facts})
    lost = any(loss is None for loss in [*found["losses"], *(loss for _, loss in found["heldout"])])
    run.finish(spec, "diverged" if diverged or lost else "done", result=found)
