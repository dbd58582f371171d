"""How long each action of a pipeline's stages takes: what a stage computes, copies and sends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from impl.errors import ConfigError
from impl.harness.pipeline_run import PipelineSetup, stage_options
from impl.harness.pipeline_spec import PipelineSpec
from impl.models.catalogue import Part
from impl.optimizers.base import Optimizer, Shape
from impl.optimizers.routing import is_matrix
from impl.projection.activations import boundary_bytes
from impl.projection.hardware import Group
from impl.projection.machine import BYTES, Block, Machine
from impl.projection.uncertain import Cost, total
from impl.rotation.method import StageContext
from impl.rotation.schedule import Action
from impl.rotation.stage_parts import kept_graphs, overrides
from impl.rotation.stash import Stash

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
class StashUse:
    """What a stage's stash does over a schedule, found by letting a :class:`impl.rotation.stash.Stash` do it.

    copied: indices of the actions that copy the newest weights.
    stashed: indices of those that run on a copy.
    buffers: versions that the stash has memory for in the end.
    """

    copied: frozenset[int]
    stashed: frozenset[int]
    buffers: int


def stash_use(spec: PipelineSpec, setup: PipelineSetup, stage: int) -> StashUse:
    """Return what the stash of ``stage`` does."""
    actions = setup.schedule.actions[stage]
    _, outlives = kept_graphs(setup.schedule, stage, setup.method, stage_options(spec))
    stash = Stash(actions, (torch.zeros(1, dtype=torch.uint8),))  # one byte a version, to count them
    copied, stashed = set[int](), set[int]()
    for index, action in enumerate(actions):
        held = len(stash.versions)
        if action.kind == "U":
            stash.before_update()
            if len(stash.versions) > held:
                copied.add(index)
            stash.after_update()
            continue
        if action.kind == "F" and action.number in outlives and action.version == stash.newest:
            stash.copy_newest()
            if len(stash.versions) > held:
                copied.add(index)
        if action.version in stash.versions:
            stashed.add(index)
        stash.used(action.version)
    return StashUse(frozenset(copied), frozenset(stashed), stash.bytes())


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
    """The costs of one stage of ``spec`` on ``machine`` with weights and activations of ``dtype``.

    forward, backward, again: by sequences of a microbatch; ``again`` is what a backward computes again although the
        graph was kept, the core attention with ``selective-attention``.
    update: norm (where the method clips), update rules (the mean over a refresh period), decay and step.
    copy: of the newest weights into the stash; load: of one version back from host memory.
    """

    def __init__(self, spec: PipelineSpec, setup: PipelineSetup, stage: int, machine: Machine, dtype: str) -> None:
        self._spec, self._setup, self._machine, self._dtype = spec, setup, machine, dtype
        self.stage = stage
        part, sizes = setup.parts[stage], set(rows_of(spec, setup))
        self.forward = {rows: self._blocks(part, rows, backward=False) for rows in sizes}
        self.backward = {rows: self._blocks(part, rows, backward=True) for rows in sizes}
        self.again = {rows: self._attention(part, rows) for rows in sizes}
        self.update = self._update(setup.contexts[stage], part)
        elements = sum(p.numel for p in setup.model.parameters(1, part))
        place = "host" if spec.stash_on_cpu else "device"
        self.copy = machine.copy(BYTES[dtype] * elements, place)
        self.load = machine.copy(BYTES[dtype] * elements, "host") if spec.stash_on_cpu else Cost.nothing()

    def pieces(self) -> Iterator[tuple[Action, tuple[Piece, ...]]]:
        """Yield the actions of the stage in order, each with what it does on the compute stream."""
        setup, sizes = self._setup, rows_of(self._spec, self._setup)
        stash = stash_use(self._spec, setup, self.stage)
        kept, _ = kept_graphs(setup.schedule, self.stage, setup.method, stage_options(self._spec))
        copy, load = (Piece("stash", self.copy),), (Piece("stash", self.load),)
        update = Piece("optimizer_step", self.update)
        for index, action in enumerate(setup.schedule.actions[self.stage]):
            ahead = copy if index in stash.copied else ()
            if action.kind == "U":
                yield action, (*ahead, update)
                continue
            if self._spec.stash_on_cpu and index in stash.stashed:
                ahead += load
            rows = sizes[action.number % setup.microbatches]
            if action.kind == "F":
                yield action, (*ahead, Piece("forward", self.forward[rows]))
                continue
            again = self.again[rows] if action.number in kept else self.forward[rows] + self.again[rows]
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

    def _update(self, context: StageContext, part: Part) -> Cost:
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
        elements = sum(p.numel for p in self._setup.model.parameters(1, part))
        if self._spec.clip > 0 and elements:
            costs.append(machine.norm(elements))
        return total([*costs, machine.apply(elements, self._dtype)]) if elements else Cost.nothing()


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
