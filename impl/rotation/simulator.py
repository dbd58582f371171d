"""The delay-exact simulator: all stages of a pipeline in one process, any number of them on one machine.

It walks the schedule with the same :class:`~impl.rotation.stage.Stage` that the runtime has in each process, so
weights, losses and state are the same to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from impl.canzona.mesh import Mesh
from impl.errors import ConfigError
from impl.harness.data import TokenStream
from impl.models import weights
from impl.models.catalogue import ModelConfig, Part
from impl.rotation.method import Method
from impl.rotation.resume import messages
from impl.rotation.schedule import Action, Schedule, in_order, staleness
from impl.rotation.stage import LogEntry, Stage
from impl.rotation.stage_parts import StageOptions

HELDOUT_CHUNK = 8
"""Sequences of one held-out forward, as in training on a DP x TP mesh."""


@dataclass(frozen=True)
class UpdateRow:
    """What is known once every stage has done an update.

    step: its 1-based number.
    loss: the mean training loss of its microbatches, each on the versions that its forward saw.
    lr: of the schedule.
    grad_norms: of each stage, before clipping.
    heldout: loss of the newest weights of all stages, where it was asked for.
    """

    step: int
    loss: float
    lr: float
    grad_norms: tuple[float, ...]
    heldout: float | None

    @property
    def finite(self) -> bool:
        """Whether training can go on.  Of gradients the next loss tells: an optimizer may skip one."""
        return math.isfinite(self.loss) and math.isfinite(self.heldout or 0.0)


@dataclass
class Simulation:
    """The result of :func:`simulate`.

    losses: training loss of each update; heldout: ``(step, loss)``.
    log: what each stage did, in order, stage after stage.
    peak_versions: most versions of its weights that each stage held at a time.
    params_digest: of the newest weights of all stages (docs/numbers.md); None if the run diverged.
    """

    staleness: tuple[int, ...]
    losses: list[float] = field(default_factory=list)
    heldout: list[tuple[int, float]] = field(default_factory=list)
    log: list[LogEntry] = field(default_factory=list)
    peak_versions: tuple[int, ...] = ()
    diverged: bool = False
    params_digest: str | None = None


class Microbatches:
    """Cuts the batch of each update into the microbatches of a schedule; sizes differ by one sequence at most."""

    def __init__(self, stream: TokenStream, per_update: int) -> None:
        self._stream, self._per_update = stream, per_update
        self._update, self._batch = -1, torch.empty(0, dtype=torch.int64)

    def __call__(self, number: int) -> tuple[Tensor, float]:
        """Return the tokens ``[b, s + 1]`` of microbatch ``number`` and its share in the update's mean loss.

        Raises :class:`ConfigError` if a batch has fewer sequences than there are microbatches.
        """
        update, place = divmod(number, self._per_update)
        if update != self._update:
            batch = self._stream.batch(update + 1)
            if len(batch) < self._per_update:
                raise ConfigError(
                    f"a batch of {len(batch)} sequences cannot be cut into {self._per_update} microbatches: use a "
                    "larger batch or fewer microbatches"
                )
            self._update, self._batch = update, batch
        part = self._batch.tensor_split(self._per_update)[place]
        return part, self.share(part)

    def share(self, part: Tensor) -> float:
        """Return the share in its update's mean loss of a microbatch; every update has as many sequences."""
        return 1.0 if self._per_update == 1 else len(part) / len(self._batch)

    def state_dict(self) -> tuple[dict[str, Any], Tensor]:
        """Return what is needed to go on, as plain JSON data, and the batch that is being cut."""
        return {"update": self._update, "stream": self._stream.state_dict()}, self._batch

    def load_state_dict(self, state: dict[str, Any], batch: Tensor) -> None:
        """Go on as the one that gave ``state`` and ``batch`` would have; a stream need not be read again."""
        self._update, self._batch = state["update"], batch
        self._stream.load_state_dict(state["stream"])


def build_stages(
    config: ModelConfig,
    parts: Sequence[Part],
    schedule: Schedule,
    method: Method,
    mesh: Mesh,
    rate: Callable[[int], float],
    *,
    seed: int = 0,
    options: StageOptions | None = None,
) -> list[Stage]:
    """Return all stages of ``schedule``, in this process; arguments as for :class:`Stage`."""
    return [
        Stage(config, part, index, schedule, method, mesh, rate, seed=seed, options=options)
        for index, part in enumerate(parts)
    ]


def updates(
    stages: Sequence[Stage],
    schedule: Schedule,
    stream: TokenStream,
    eval_every: int = 0,
    microbatches: Microbatches | None = None,
) -> Iterator[UpdateRow]:
    """Run ``schedule`` and yield a row for each update as soon as all stages have done it.

    Stages that have taken over a state (:mod:`impl.rotation.resume`) go on where it was taken, after the same update.
    eval_every: take the held-out loss every so many updates and after the last one; 0 for never.
    microbatches: of ``stream``, where they go on from a state too.
    """
    walk = _Walk(stages, microbatches or Microbatches(stream, schedule.per_update))
    norms: dict[int, float] = {}
    for index, action in in_order(schedule, [len(stage.log) for stage in stages]):
        if action.kind != "U":
            walk.step(index, action)
            continue
        norms[index] = stages[index].update(action.number).grad_norm
        if len(norms) == schedule.stages:
            step = action.number + 1
            due = eval_every > 0 and (step % eval_every == 0 or step == schedule.updates)
            loss = math.fsum(
                walk.losses.pop(schedule.per_update * action.number + i) for i in range(schedule.per_update)
            )
            heldout = heldout_loss(stages, stream) if due else None
            by_stage = tuple(norms[stage] for stage in range(schedule.stages))
            yield UpdateRow(step, loss, stages[0].rate(step), by_stage, heldout)
            norms.clear()


def simulate(
    stages: Sequence[Stage],
    schedule: Schedule,
    stream: TokenStream,
    *,
    eval_every: int = 0,
    report: Callable[[UpdateRow], None] | None = None,
    microbatches: Microbatches | None = None,
) -> Simulation:
    """Run ``schedule`` to its end, or to the first loss that is not finite; it must leave finite weights.

    report: called with each update's row, when all stages have just done it.
    microbatches: as for :func:`updates`.
    """
    out = Simulation(staleness(schedule))
    for row in updates(stages, schedule, stream, eval_every, microbatches):
        out.losses.append(row.loss)
        if row.heldout is not None:
            out.heldout.append((row.step, row.heldout))
        if report is not None:
            report(row)
        if not row.finite:
            out.diverged = True
            break
    out.diverged |= not all(stage.is_sound() for stage in stages)
    out.log = [entry for stage in stages for entry in stage.log]
    out.peak_versions = tuple(stage.peak_stash_versions for stage in stages)
    out.params_digest = None if out.diverged else params_digest(stages)
    return out


def heldout_loss(stages: Sequence[Stage], stream: TokenStream) -> float:
    """Return the mean held-out loss of the newest weights of all stages."""
    heldout, sums = stream.heldout(), []
    for chunk in heldout.split(HELDOUT_CHUNK):
        hidden: Tensor | None = None
        for stage in stages:
            hidden = stage.evaluate(hidden, chunk if stage.needs_tokens else None)
        assert hidden is not None, "there is at least one stage"
        sums.append((hidden.double() * len(chunk)).item())
    return math.fsum(sums) / len(heldout)


def params_digest(stages: Sequence[Stage]) -> str:
    """Return the digest of the newest weights of all stages, the same for every number of stages."""
    for stage in stages:
        stage.bind_newest()
    config, group = stages[0].config, stages[0].model.pg_collection.tp
    every = (pair for s in stages for pair in weights.whole_parameters(s.model, config, group, s.part))
    return weights.params_digest(config, every)


class _Walk:
    """The messages between stages.

    losses: by microbatch, each times its share in the update.
    """

    def __init__(self, stages: Sequence[Stage], microbatches: Microbatches) -> None:
        self._stages, self._microbatches = stages, microbatches
        self._hidden = {
            (sender.index + 1, number): hidden for sender in stages for number, hidden in messages(sender).items()
        }
        self._grads: dict[tuple[int, int], Tensor] = {}
        self._tokens = {
            number: (flight.tokens, microbatches.share(flight.tokens))
            for number, flight in stages[0].flight.items()
            if flight.tokens is not None
        }
        self.losses: dict[int, float] = {}

    def step(self, index: int, action: Action) -> None:
        """Run a forward or backward of stage ``index``."""
        stage, number = self._stages[index], action.number
        if action.kind == "F":
            if stage.is_first:
                self._tokens[number] = self._microbatches(number)
            tokens, share = self._tokens[number]
            hidden = None if stage.is_first else self._hidden.pop((index, number))
            output = stage.forward(number, hidden, action.version, tokens if stage.needs_tokens else None)
            if stage.is_last:
                self.losses[number] = output.item() * share
            else:
                self._hidden[index + 1, number] = output
            return
        grad = None if stage.is_last else self._grads.pop((index, number))
        grad = stage.backward(number, grad, action.version, self._tokens[number][1])
        if grad is not None:
            self._grads[index - 1, number] = grad
        else:
            del self._tokens[number]
