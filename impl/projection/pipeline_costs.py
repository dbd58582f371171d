"""How long each action of a pipeline's stages takes: what a stage computes, copies and sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from impl.errors import ConfigError
from impl.harness.pipeline_run import PipelineSetup, prepare
from impl.harness.pipeline_spec import PipelineSpec
from impl.models.catalogue import Part
from impl.optimizers.base import Optimizer, Shape
from impl.optimizers.routing import is_matrix
from impl.projection.activations import boundary_bytes
from impl.projection.hardware import Group
from impl.projection.machine import BYTES, Block, Machine
from impl.projection.pipeline_flight import PipelineFlight, in_flight
from impl.projection.uncertain import Cost, total
from impl.rotation.method import StageContext, create_method
from impl.rotation.schedule import Action
from impl.rotation.stage_parts import overrides

HOOKS = ("predict", "correct", "backward_weights")
"""What a method may do at every microbatch, whose time is not modelled."""
FLAG_ELEMENTS = 1
"""Every message has one element besides the hidden states: whether the pipeline stops."""


@dataclass(frozen=True)
class Piece:
    """A part of an action on its stage's compute stream."""

    phase: str
    cost: Cost


@dataclass(frozen=True)
class Full:
    """A pipeline with as many updates as it takes to fill it and see it run.

    spec: with these updates.  filled: how many of them fill it; timed: how many after these show how it runs.  The
        rest, if any, would be done faster, because no more microbatches come in.
    flights: what every stage keeps.
    """

    spec: PipelineSpec
    setup: PipelineSetup
    filled: int
    timed: int
    flights: tuple[PipelineFlight, ...]


def full(spec: PipelineSpec, dtype: str, *, as_run: bool = False) -> Full:
    """Return the pipeline of ``spec`` over as many updates as it takes, or over its own with ``as_run``.

    At most ``stages`` microbatches are on their way, so that a full pipeline repeats itself after as many at the
    latest; one that drains repeats itself from one drain to the next.

    Raises :class:`ConfigError` for settings that cannot work or are not modelled.
    """
    if as_run:
        filled = min(2 * spec.stages, spec.steps // 2)
        updates, measured = spec.steps, spec.steps - filled
    elif spec.drain_every:
        filled = measured = spec.drain_every
        updates = 2 * spec.drain_every
    else:
        mode = spec.mode or create_method(spec.method, spec.method_settings).modes[0]
        synchronous, grouped = mode == "sync", mode in ("sync", "2bw")
        measured = 1 if synchronous else -(-spec.stages // (spec.microbatches or (spec.stages if grouped else 1)))
        filled = 1 if synchronous else 2 * measured + 1
        updates = filled + measured + (0 if synchronous else measured)
    timed = spec.model_copy(update={"steps": updates})
    setup = prepare(timed)
    check(spec, setup, dtype)
    length, schedule = timed.drain_every or timed.steps, setup.schedule
    segments = tuple(min(length, timed.steps - begin) for begin in range(0, timed.steps, length))
    recompute = spec.recompute
    flights = in_flight(schedule.name, schedule.mode, spec.stages, schedule.per_update, segments, recompute)
    return Full(timed, setup, filled, measured, flights)


def rows_of(spec: PipelineSpec, setup: PipelineSetup) -> tuple[int, ...]:
    """Return the sequences of each microbatch of an update: sizes differ by one at most."""
    least, more = divmod(spec.batch, setup.microbatches)
    return tuple(least + (i < more) for i in range(setup.microbatches))


def check(spec: PipelineSpec, setup: PipelineSetup, dtype: str) -> None:
    """Raise :class:`ConfigError` for what is not modelled."""
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype {dtype!r}: use float32, as the runtime does, or bfloat16")
    if spec.replicas > 1:
        raise ConfigError("a pipeline is projected with one replica of each stage: use replicas 1")
    if hooks := [hook for hook in HOOKS if overrides(setup.method, hook)]:
        raise ConfigError(
            f"{spec.method} changes weights or gradients by its own {', '.join(hooks)}, whose time and memory are not "
            "modelled: project pipedream, which has the same schedule"
        )
    if spec.sequence > (longest := setup.model.arch.max_position_embeddings):
        raise ConfigError(f"sequence {spec.sequence} is longer than {spec.model}'s {longest} positions")


class StageCosts:
    """The costs of one stage of ``pipeline`` on ``machine`` with weights and activations of ``dtype``.

    forward, backward, again: by sequences of a microbatch; ``again`` is what a backward computes again although the
        graph was kept, the core attention with ``selective-attention``.
    norm: of the gradients.  update: update rules (the mean over a refresh period), decay and step.
    copy: of the newest weights into the stash; load: of one version back from host memory.
    """

    def __init__(self, pipeline: Full, stage: int, machine: Machine, dtype: str) -> None:
        spec, setup = pipeline.spec, pipeline.setup
        self._spec, self._setup, self._machine, self._dtype = spec, setup, machine, dtype
        self.stage, self.flight = stage, pipeline.flights[stage]
        part, sizes = setup.parts[stage], set(rows_of(spec, setup))
        self.forward = {rows: self._blocks(part, rows, backward=False) for rows in sizes}
        self.backward = {rows: self._blocks(part, rows, backward=True) for rows in sizes}
        self.again = {rows: self._attention(part, rows) for rows in sizes}
        self.norm, self.update = self._update(setup.contexts[stage], part)
        elements = sum(p.numel for p in setup.model.parameters(1, part))
        place = "host" if spec.stash_on_cpu else "device"
        self.copy = machine.copy(BYTES[dtype] * elements, place)
        self.load = machine.copy(BYTES[dtype] * elements, "host") if spec.stash_on_cpu else Cost.nothing()

    def pieces(self) -> Iterator[tuple[Action, tuple[Piece, ...]]]:
        """Yield the actions of the stage in order, each with what it does on the compute stream."""
        setup, sizes = self._setup, rows_of(self._spec, self._setup)
        flight = self.flight
        copy, load = (Piece("stash", self.copy),), (Piece("stash", self.load),)
        update = Piece("grad_norm", self.norm), Piece("optimizer_step", self.update)
        for index, action in enumerate(setup.schedule.actions[self.stage]):
            ahead = copy if index in flight.copied else ()
            if action.kind == "U":
                yield action, (*ahead, *update)
                continue
            if self._spec.stash_on_cpu and index in flight.stashed:
                ahead += load
            rows = sizes[action.number % setup.microbatches]
            if action.kind == "F":
                yield action, (*ahead, Piece("forward", self.forward[rows]))
                continue
            again = self.again[rows] if action.number in flight.kept else self.forward[rows] + self.again[rows]
            repeated = (Piece("recompute", again),) if again.seconds[0] > 0 else ()
            yield action, (*ahead, *repeated, Piece("backward", self.backward[rows]))

    def _blocks(self, part: Part, rows: int, *, backward: bool) -> Cost:
        run = self._machine.backward if backward else self._machine.forward
        costs = [run(self._block("layer", rows)).times(part.layers)] if part.layers else []
        costs += [run(self._block("embedding", rows))] if part.embedding else []
        costs += [run(self._block("head", rows))] if part.head else []
        return total(costs)

    def _attention(self, part: Part, rows: int) -> Cost:
        if self._spec.recompute != "selective-attention" or not part.layers:
            return Cost.nothing()
        return self._machine.attention(self._block("layer", rows)).times(part.layers)

    def _block(self, kind: str, rows: int) -> Block:
        return Block(self._setup.model.arch, kind, 1, rows, self._spec.sequence, self._dtype)  # type: ignore[arg-type]

    def _update(self, context: StageContext, part: Part) -> tuple[Cost, Cost]:
        """Return the norm of the gradients, and the rest of an update."""
        method, machine = self._setup.method, self._machine
        rules: dict[bool, Optimizer] = {
            True: method.matrix_optimizer(context),
            False: method.elementwise_optimizer(context),
        }
        shapes, flat = Counter[tuple[bool, Shape]](), Counter[bool]()
        for parameter in self._setup.model.parameters(1, part):
            matrix = is_matrix(parameter)
            if rules[matrix].atomic:
                shapes[matrix, parameter.shape] += 1
            else:  # the engine updates such a family as flat ranges
                flat[matrix] += parameter.numel
        costs = [machine.update(rules[matrix], shape).times(count) for (matrix, shape), count in shapes.items()]
        costs += [machine.update(rules[matrix], (count,)) for matrix, count in flat.items()]
        elements, elementwise = sum(p.numel for p in self._setup.model.parameters(1, part)), sum(flat.values())
        if not elements:
            return Cost.nothing(), Cost.nothing()
        # the engine takes the norm, which also finds gradients that are not finite, in any case
        kinds = {"layer": part.layers, "embedding": int(part.embedding), "head": int(part.head)}
        blocks = [(self._block(kind, 1), count) for kind, count in kinds.items() if count]
        costs += [machine.gradients(block).times(count) for block, count in blocks]
        norm = total([machine.norm(elements - elementwise), machine.norm(elementwise, exact=True)])
        return norm, total([*costs, machine.apply(elements, self._dtype)])


class Links:
    """The messages between neighbouring stages, one stage a device, nodes filled one after the other."""

    def __init__(self, spec: PipelineSpec, setup: PipelineSetup, machine: Machine, dtype: str) -> None:
        self._machine, self._arch, self._sequence, self._size = machine, setup.model.arch, spec.sequence, BYTES[dtype]
        self._known: dict[tuple[bool, int], Cost] = {}

    def bytes(self, rows: int) -> float:
        """Return the bytes of a message with hidden states, or their gradients, of ``rows`` sequences."""
        return boundary_bytes(self._arch, rows * self._sequence, self._size) + self._size * FLAG_ELEMENTS

    def cost(self, first: int, rows: int) -> Cost:
        """Return the time of a message between stages ``first`` and ``first + 1``, in either direction."""
        node = self._machine.devices_per_node
        inside = first // node == (first + 1) // node
        if (inside, rows) not in self._known:
            group = Group(2) if inside else Group(2, node)
            self._known[inside, rows] = self._machine.collective("send", [self.bytes(rows)], group)
        return self._known[inside, rows]
