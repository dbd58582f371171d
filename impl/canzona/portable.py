"""The state of an engine as whole tensors that do not depend on mesh, strategy or buckets.

Names: ``step`` and ``skips``, counts of the engine; ``master/{parameter}``, fp32, in the parameter's whole shape;
``state/{parameter}[/{fragment}]/{key}``.  A tensor of an atomic rule's state is whole where its host keeps it.  One of
an elementwise rule has the parameter's shape, in rectangles of it; a scalar of such a rule is kept for each parameter,
and must depend on the step alone.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from impl.canzona.buffers import FamilyBuffer, Run
from impl.canzona.collectives import all_gather_single
from impl.canzona.engine import Engine
from impl.canzona.global_tensor import GlobalTensor
from impl.canzona.plan import Plan
from impl.canzona.rectangles import Rectangle, Shape, rectangles

STEP, SKIPS = "step", "skips"


def export(engine: Engine, unpadded: Mapping[str, Shape] | None = None) -> dict[str, GlobalTensor]:
    """Return what this rank keeps of the state, by name, as views.

    unpadded: the shapes of parameters without the vocabulary padding, which depends on the tensor-parallel degree and
        is left out: it is zero, and so is its state.

    Raises ``ValueError`` for a state of an elementwise rule that is neither of its range's shape nor a scalar.
    """
    view = _View(engine, unpadded)
    counts = {STEP: engine.steps, SKIPS: engine.skips}
    out = {name: GlobalTensor.whole(torch.tensor(count)) for name, count in counts.items()}
    found: dict[str, list[Rectangle]] = defaultdict(list)
    for buffer in engine.buffers:
        for run in buffer.runs:
            for index, low, flat in view.cut(buffer, run, buffer.masters[run.name]):
                found[f"master/{view.module(index)}"] += view.rectangles(index, low, flat)
            if run.parameter is None:
                for key, tensor in engine.states[run.name].items():
                    _export_elementwise(view, buffer, run, key, tensor, found, out)
    for name, state in engine.states.items():
        if name not in view.elementwise:
            out |= {f"state/{name}/{key}": GlobalTensor.whole(tensor) for key, tensor in state.items()}
    for key, pieces in found.items():
        if pieces:
            out[key] = GlobalTensor(view.shape_of(key), pieces)
    return out


def restore(
    engine: Engine, load: Callable[[dict[str, GlobalTensor]], None], unpadded: Mapping[str, Shape] | None = None
) -> int:
    """Let a fresh ``engine`` go on from what ``load`` fills in; return its step.  All ranks must call.

    load: fills the rectangles of :func:`export` in place.

    Raises ``ValueError`` if scalars of parameters that are updated together differ, ``RuntimeError`` if two ranks that
    should hold the same parameter do not.
    """
    tree = export(engine, unpadded)
    shared = _split_scalars(engine, tree, unpadded)
    load(tree)
    for tensor, keys in shared:
        values = [tree[key].rectangles[0].tensor for key in keys]
        for key, value in zip(keys, values, strict=True):
            if not torch.equal(value, values[0]):
                raise ValueError(
                    f"{keys[0]} is {values[0].item()} but {key} is {value.item()}: they can only go on together if "
                    "they are equal"
                )
        tensor.copy_(values[0])
    engine.adopt(*(int(tree[name].rectangles[0].tensor) for name in (STEP, SKIPS)))
    check_replicas(engine)
    return engine.steps


def check_replicas(engine: Engine) -> None:
    """Raise ``RuntimeError``, naming the first parameter of which two ranks hold different bits; all ranks must call.

    Shards are compared over the DP ranks, parameters that tensor parallelism does not cut over all ranks.
    """
    mesh, held = engine.mesh, sorted((i, p) for b in engine.buffers for i, p in b.module_parameters.items())
    digests = [hashlib.sha256(_bytes(parameter.detach())).digest() for _, parameter in held]
    mine = torch.tensor(list(b"".join(digests)), dtype=torch.uint8, device=mesh.device)
    rows = mine.new_empty(mesh.dp * mesh.tp * len(mine))
    all_gather_single(rows, mine, group=mesh.world_group)
    table = rows.cpu().view(mesh.dp, mesh.tp, len(held), -1)
    for place, (index, _) in enumerate(held):
        spec, found = engine.plan.parameters[index], table[:, :, place]
        same = found[:1] if spec.tp_dim is not None else found[:1, :1]
        if not bool((found == same).all()):
            d, t = (found != same).any(-1).nonzero()[0].tolist()
            raise RuntimeError(f"the replicas of {spec.module} differ: rank {d * mesh.tp + t} holds other bits")


def whole_shapes(plan: Plan) -> dict[str, Shape]:
    """Return the shape of each module parameter of ``plan``, its blocks put together again."""
    shapes: dict[str, Shape] = {}
    for spec in plan.parameters:
        rows = spec.shape[:1] and (max(spec.first + spec.shape[0], shapes.get(spec.module, (0,))[0]),)
        shapes[spec.module] = (*rows, *spec.shape[1:])
    return shapes


class _View:
    """How an engine's runs lie in whole parameters."""

    def __init__(self, engine: Engine, unpadded: Mapping[str, Shape] | None) -> None:
        self._plan, self._mesh = engine.plan, engine.mesh
        self._shapes = whole_shapes(engine.plan) | dict(unpadded or {})
        self.elementwise = {run.name for b in engine.buffers for run in b.runs if run.parameter is None}

    def module(self, index: int) -> str:
        return self._plan.parameters[index].module

    def shape_of(self, key: str) -> Shape:
        """Shape of the whole tensor ``master/{parameter}`` or, of an elementwise rule, ``state/{parameter}/{key}``."""
        return self._shapes[key.split("/")[1]]

    def cut(self, buffer: FamilyBuffer, run: Run, flat: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield for each parameter of ``run`` its index, its first element in the shard, and its part of ``flat``."""
        for slot in buffer.family.slots:
            low, high = max(slot.start, run.start), min(slot.end, run.end)
            if low < high and run.parameter in (None, slot.parameter):
                yield slot.parameter, low - slot.start, flat[low - run.start : high - run.start]

    def rectangles(self, index: int, low: int, flat: Tensor) -> list[Rectangle]:
        spec = self._plan.parameters[index]
        return rectangles(flat, low, spec, self._mesh.tp, self._mesh.tp_rank, self._shapes[spec.module])


def _export_elementwise(
    view: _View,
    buffer: FamilyBuffer,
    run: Run,
    key: str,
    tensor: Tensor,
    found: dict[str, list[Rectangle]],
    out: dict[str, GlobalTensor],
) -> None:
    if tensor.dim() and tensor.shape != (run.end - run.start,):
        raise ValueError(
            f"{buffer.family.optimizer} keeps {key} of shape {list(tensor.shape)} for a range of {run.end - run.start} "
            "elements: the state of an elementwise rule is one number per element, or a scalar"
        )
    for index, low, flat in view.cut(buffer, run, tensor if tensor.dim() else buffer.masters[run.name]):
        name = f"state/{view.module(index)}/{key}"
        if tensor.dim():
            found[name] += view.rectangles(index, low, flat)
        else:
            out[name] = GlobalTensor.whole(tensor)


def _split_scalars(
    engine: Engine, tree: dict[str, GlobalTensor], unpadded: Mapping[str, Shape] | None
) -> list[tuple[Tensor, list[str]]]:
    """Give each parameter of a run its own copy of the run's scalars in ``tree``; return the scalars and their keys."""
    view, shared = _View(engine, unpadded), []
    for buffer in engine.buffers:
        for run in buffer.runs:
            if run.parameter is not None:
                continue
            names = [view.module(index) for index, _, _ in view.cut(buffer, run, buffer.masters[run.name])]
            for key, tensor in engine.states[run.name].items():
                if tensor.dim() == 0:
                    keys = [f"state/{name}/{key}" for name in names]
                    shared.append((tensor, keys))
                    tree |= {name: GlobalTensor.whole(tensor.clone()) for name in keys}
    return shared


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().data
