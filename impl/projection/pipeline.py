"""A pipeline's schedule on a timeline: how long an update takes, which stages wait, and for what.

Every stage works through its actions in the order of its schedule, as :mod:`impl.rotation.runtime` does: it waits for
the message that an action needs, computes, and sends.  Where the machine does not share its cores with communication a
message travels beside the computation, one after the other in each direction; where it does, it takes the sender's
cores and then the receiver's.

Refreshes of bases count with their mean over a period.  Without stagger a stage really needs longer at one update in
so many, on all stages at once, so that the mean is right while single updates are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from impl.harness.pipeline_run import PipelineSetup
from impl.harness.pipeline_spec import PipelineSpec
from impl.projection import pipeline_costs
from impl.projection.machine import Machine
from impl.projection.pipeline_costs import Full, Links, Piece, StageCosts, full
from impl.projection.timeline import COMPUTE
from impl.projection.trace import Span, chrome
from impl.projection.uncertain import DRAWS, Cost, Samples, exact, shares
from impl.rotation.gantt import Bar
from impl.rotation.schedule import Action, in_order

SEND = {"F": "send activations", "B": "send gradients"}
"""Streams of the two directions."""
ROUNDING = 1e-9
"""Smaller shares of an update are no exposed communication."""


@dataclass(frozen=True, slots=True)  # a long run has many
class Slot:
    """Something that a stage does on one of its streams.

    start, end: seconds ``[1 + DRAWS]``.  bytes: of a message, on the stage that sends it; else 0.
    """

    stage: int
    stream: str
    phase: str
    action: Action
    start: Samples
    end: Samples
    cost: Cost
    bytes: float = 0.0


@dataclass(frozen=True)
class Track:
    """Every slot of a run of the schedule, in the order in which they were placed.

    ends: when the last stage has done each update, seconds ``[1 + DRAWS]``.
    occupied: for each stage, how long its compute stream was in use until the end of each update.
    """

    stages: int
    slots: tuple[Slot, ...]
    ends: tuple[Samples, ...]
    occupied: tuple[tuple[Samples, ...], ...]

    def busy(self) -> Samples:
        """Return the seconds that all stages together compute ``[1 + DRAWS]``: no waits, no messages."""
        counts: Counter[int] = Counter()
        costs: dict[int, Cost] = {}
        for slot in self._computed():
            counts[id(slot.cost)] += 1
            costs[id(slot.cost)] = slot.cost
        return sum((costs[key].seconds * n for key, n in counts.items()), exact(0.0))

    def end(self) -> Samples:
        """Return when the last stage has done everything ``[1 + DRAWS]``."""
        last = {slot.stage: slot.end for slot in self._computed()}
        return np.max(list(last.values()), axis=0)

    def bubble(self) -> Samples:
        """Return the share of all stages' time, first to last action of the run, in which they do not compute."""
        return 1.0 - self.busy() / (self.stages * self.end())

    def most(self, phase: str) -> Samples:
        """Return the seconds of ``phase`` for one update on the stage that computes most of it ``[1 + DRAWS]``."""
        sums = [np.zeros(1 + DRAWS) for _ in range(self.stages)]
        for slot in self.slots:
            if slot.phase == phase:
                sums[slot.stage] = sums[slot.stage] + slot.cost.seconds
        return np.max(sums, axis=0) / len(self.ends)

    def bytes(self) -> dict[str, float]:
        """Return the bytes of all messages by stream."""
        out = dict.fromkeys(SEND.values(), 0.0)
        for slot in self.slots:
            if slot.bytes:
                out[SEND[slot.action.kind]] += slot.bytes
        return out

    def evidence(self) -> dict[str, float]:
        """Return the share of computing and sending time by source."""
        counts = Counter(id(slot.cost) for slot in self.slots)
        costs = {id(slot.cost): slot.cost for slot in self.slots}
        return shares([(costs[key].evidence, n * float(costs[key].seconds[0])) for key, n in counts.items()])

    def bars(self) -> list[Bar]:
        """Return the nominal time of every action, for a Gantt chart."""
        spans: dict[tuple[int, Action], tuple[float, float]] = {}
        for slot in self._computed():
            begin, end = float(slot.start[0]), float(slot.end[0])
            known = spans.get((slot.stage, slot.action), (begin, end))
            spans[slot.stage, slot.action] = min(begin, known[0]), max(end, known[1])
        return [Bar(stage, action, *span) for (stage, action), span in spans.items()]

    def trace(self) -> str:
        """Return the nominal timeline as a Chrome trace (JSON), which Perfetto and ``chrome://tracing`` open."""
        spans = (
            Span(
                process=slot.stage,
                stream=slot.stream,
                phase=slot.phase,
                name=f"{slot.phase} {slot.action.number}",
                start=float(slot.start[0]),
                seconds=float(slot.end[0] - slot.start[0]),
                notes={"version": slot.action.version},
            )
            for slot in self.slots
        )
        return chrome([f"stage {stage}" for stage in range(self.stages)], spans)

    def _computed(self) -> Iterator[Slot]:
        return (slot for slot in self.slots if slot.phase not in SEND.values())


@dataclass(frozen=True)
class PipelineProjection:
    """What a pipeline does on a machine.  Samples are ``[1 + DRAWS]``.

    update_s: seconds between two updates once the pipeline is full; with ``as_run`` between those of the last stage.
    bubble: share of all stages' time in that state in which they do not compute.
    exposed_s: how much shorter ``update_s`` would be if messages took no time.
    track: the whole run.  pipeline: what was run, and which of its updates ``update_s`` is the mean of.
    """

    spec: PipelineSpec
    update_s: Samples
    bubble: Samples
    exposed_s: Samples
    track: Track
    pipeline: Full

    @property
    def samples_per_s(self) -> Samples:
        """Sequences a second."""
        return self.spec.batch / self.update_s

    @property
    def norm_share(self) -> Samples:
        """The share of ``update_s`` in which a stage takes the norm of its gradients, on the stage with most of it.

        The engine sums the squares of what its optimizer updates elementwise exactly, so that the norm does not depend
        on how gradients are cut (:mod:`impl.canzona.norm`): many passes over memory.
        """
        return self.track.most("grad_norm") / self.update_s

    @property
    def evidence(self) -> dict[str, float]:
        """The share of computing and sending time by source."""
        return self.track.evidence()


def project(
    spec: PipelineSpec, machine: Machine, dtype: str = "float32", *, as_run: bool = False, known: Full | None = None
) -> PipelineProjection:
    """Return what the pipeline of ``spec`` does on ``machine``.

    dtype: of weights, activations and messages: ``float32``, as the runtime has them, or ``bfloat16``, with fp32
        gradients, masters and state.
    as_run: play the updates of ``spec`` to their end instead of as many as it takes to fill the pipeline and see it
        run, and time them on the last stage alone.  A comparison with a measured run leaves this off if the run's first
        updates are not timed: what it is to check is the projection that experiments show, of a full pipeline, and
        the rest of such a run is one.  The two differ where a stage before the last one is slightly slower than it:
        the last stage then works off what piled up before it for so long that a finite run looks faster.
    known: what :func:`impl.projection.pipeline_costs.full` returns for these.

    Raises :class:`ConfigError` for settings that cannot work or are not modelled.
    """
    pipeline = known or full(spec, dtype, as_run=as_run)
    timed, setup = pipeline.spec, pipeline.setup
    stages = [StageCosts(pipeline, stage, machine, dtype) for stage in range(timed.stages)]
    pieces = [dict(stage.pieces()) for stage in stages]
    track = play(timed, setup, pieces, Links(timed, setup, machine, dtype), shared=machine.shared)
    silent = play(timed, setup, pieces, None, shared=machine.shared)
    per_update = track.busy() / setup.schedule.updates
    update_s = _on_cores(_pace(track, pipeline, as_run), track, machine)
    saved = update_s - _on_cores(_pace(silent, pipeline, as_run), silent, machine)
    exposed = np.where(saved > ROUNDING * update_s, saved, 0.0)
    bubble = 1.0 - per_update / (spec.stages * update_s)
    return PipelineProjection(spec, update_s, bubble, exposed, track, pipeline)


def _on_cores(pace: Samples, track: Track, machine: Machine) -> Samples:
    """Return ``pace``, or what the work of all stages, messages included, takes on the cores that they share."""
    if machine.cores is None:
        return pace
    work = sum((slot.end - slot.start for slot in track.slots), np.zeros(1 + DRAWS))
    return np.maximum(pace, work / len(track.ends) / machine.cores)


def play(
    spec: PipelineSpec,
    setup: PipelineSetup,
    pieces: Sequence[Mapping[Action, Sequence[Piece]]],
    links: Links | None,
    *,
    shared: bool,
) -> Track:
    """Return the track of the schedule of ``setup``.

    pieces: for each stage what its actions do on the compute stream.
    links: None for messages that take no time.  shared: messages take the cores of sender and receiver.
    """
    sizes = pipeline_costs.rows_of(spec, setup)
    free: list[Samples] = [np.zeros(1 + DRAWS) for _ in pieces]
    streams: dict[tuple[int, str], Samples] = {}
    messages: dict[tuple[int, str, int], tuple[Samples, Cost]] = {}
    slots, nothing, last = list[Slot](), Cost.nothing(), spec.stages - 1
    ends, occupied = list[Samples](), [[np.zeros(1 + DRAWS)] for _ in pieces]
    for stage, action in in_order(setup.schedule):
        ready, kind = free[stage], action.kind
        if (message := messages.pop((stage, kind, action.number), None)) is not None:
            arrived, cost = message
            ready = np.maximum(ready, arrived)
            if shared and links is not None:
                slots.append(Slot(stage, COMPUTE, SEND[kind], action, ready, ready + cost.seconds, cost))
                ready = slots[-1].end
                occupied[stage][-1] = occupied[stage][-1] + cost.seconds
        for piece in pieces[stage][action]:
            start, ready = ready, ready + piece.cost.seconds
            slots.append(Slot(stage, COMPUTE, piece.phase, action, start, ready, piece.cost))
            occupied[stage][-1] = occupied[stage][-1] + piece.cost.seconds
        if kind == "U":
            occupied[stage].append(occupied[stage][-1])
            if stage == last:
                ends.append(ready)
        elif 0 <= (target := stage + (1 if kind == "F" else -1)) <= last:
            if links is None:
                messages[target, kind, action.number] = ready, nothing
            else:
                rows = sizes[action.number % setup.microbatches]
                cost, stream = links.cost(min(stage, target), rows), COMPUTE if shared else SEND[kind]
                start = ready if shared else np.maximum(ready, streams.get((stage, stream), ready))
                arrival = start + cost.seconds
                slots.append(Slot(stage, stream, SEND[kind], action, start, arrival, cost, links.bytes(rows)))
                messages[target, kind, action.number] = arrival, cost
                if shared:
                    ready = arrival
                    occupied[stage][-1] = occupied[stage][-1] + cost.seconds
                else:
                    streams[stage, stream] = arrival
        free[stage] = ready
    return Track(spec.stages, tuple(slots), tuple(ends), tuple(tuple(known[:-1]) for known in occupied))


def _pace(track: Track, pipeline: Full, as_run: bool) -> Samples:
    """Return the seconds between two of the timed updates on the last stage; of a run of one update its end.

    Behind a slower stage the last one first works off what piled up before it, for longer the smaller the difference,
    so that a full pipeline is as slow at least as its busiest stage.  A run is timed on its last stage as it is.
    """
    first, last = pipeline.filled, pipeline.filled + pipeline.timed

    def mean(marks: Sequence[Samples]) -> Samples:
        begin = marks[first - 1] if first else exact(0.0)
        return (marks[last - 1] - begin) / (last - first)

    return mean(track.ends) if as_run else np.max([mean(marks) for marks in (track.ends, *track.occupied)], axis=0)
