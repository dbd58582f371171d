"""What one rank must hold: bytes of the whole-model state, of the exchange, and of activations.

Parameters, gradients, masters and optimizer state are exact: they follow from the plan's shapes.  Activations follow
from the layer, with the assumptions that :func:`activation_bytes` states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from impl.canzona.plan import Plan
from impl.models.catalogue import ModelConfig
from impl.optimizers.base import Optimizer
from impl.projection import activations, ranks
from impl.projection.machine import Machine
from impl.projection.timeline import Array
from impl.projection.workload import TpUpdate, Uneven, Workload

EXACT = "planned: exact shapes"
STATIC = ("parameters", "gradients", "masters", "state")
"""Parts that are held all the time."""
MOMENTS = (("activations", "logits", "staged"), ("micro_groups",), ("gathered",))
"""Parts that are held together: in the backward, in the optimizer, and in one gather of all parameters."""


@dataclass(frozen=True)
class Memory:
    """Bytes that the rank which needs most must hold.

    parts: bytes by name.  total: the parts that are held all the time, and the largest of the moments of a step: the
        others' buffers are free by then.
    rank: (DP rank, TP rank).
    evidence: source of each part.
    """

    parts: dict[str, int]
    total: int
    rank: tuple[int, int]
    evidence: dict[str, str]


def needed(
    plan: Plan,
    costs: Sequence[Optimizer],
    config: ModelConfig,
    work: Workload,
    *,
    tp_update: TpUpdate = "exchange",
    uneven: Uneven = "rooted",
) -> Memory:
    """Return the memory of ``plan``; ``costs`` is the optimizer of each of its parameters.

    uneven: ``padded`` collectives stage their segments, here of the one largest bucket of gradients.

    Left out: the optimizer's temporaries (Newton-Schulz needs about one fp32 copy of the matrices that are updated
    together), the gradient of one parameter before it is added to the buffer, and what the allocator wastes.

    Raises :class:`ConfigError` if the batch does not divide.
    """
    mesh = plan.dp, plan.tp
    parts = by_rank(plan, costs, config, work, tp_update=tp_update, uneven=uneven)
    moments = [sum((parts[name] for name in names), np.zeros(mesh)) for names in MOMENTS]
    total = sum((parts[name] for name in STATIC), np.zeros(mesh)) + np.max(moments, axis=0)
    dp, tp = (int(i) for i in np.unravel_index(int(total.argmax()), mesh))
    layer = f"formula: what autograd keeps of a layer, fused attention, recompute {work.recompute}"
    sources = dict.fromkeys(parts, EXACT) | {"activations": layer, "logits": "formula: fp32 softmax and gradient"}
    return Memory({n: round(v[dp, tp]) for n, v in parts.items()}, round(total[dp, tp]), (dp, tp), sources)


def by_rank(
    plan: Plan,
    costs: Sequence[Optimizer],
    config: ModelConfig,
    work: Workload,
    *,
    tp_update: TpUpdate = "exchange",
    uneven: Uneven = "rooted",
) -> dict[str, Array]:
    """Return the bytes ``[dp, tp]`` of each part on every rank; see :func:`needed`."""
    mesh = plan.dp, plan.tp
    whole = sum(family.numel for family in plan.families)
    masters, state = owned_bytes(plan, costs, tp_update=tp_update)
    once = sum(ranks.gathered_once(plan)) if plan.dp > 1 else 0
    return {
        "parameters": np.full(mesh, float(work.size * whole)),
        "gradients": np.full(mesh, 4.0 * whole),
        "masters": masters if work.dtype != "float32" else np.zeros(mesh),
        "state": state,
        "micro_groups": _update_bytes(plan, tp_update),
        "gathered": np.full(mesh, float(work.size * once)),
        "activations": np.full(mesh, activation_bytes(config, work, plan.dp, plan.tp)),
        "logits": np.full(mesh, logit_bytes(config, work, plan.dp, plan.tp)),
        "staged": np.full(mesh, _staged_bytes(plan) if uneven == "padded" else 0.0),
    }


def fits(memory: Memory, machine: Machine) -> str | None:
    """Return the line that says what is missing, None if ``memory`` fits or the machine's is not known."""
    if machine.memory_bytes is None or memory.total <= machine.memory_bytes:
        return None
    dp, tp = memory.rank
    have = machine.memory_bytes / 1e9
    return f"needs {memory.total / 1e9:.1f} GB on rank dp {dp} tp {tp}, the card has {have:.1f} GB"


def owned_bytes(plan: Plan, costs: Sequence[Optimizer], *, tp_update: TpUpdate = "exchange") -> tuple[Array, Array]:
    """Return the bytes ``[dp, tp]`` of fp32 values that each rank's updates apply to, and of its optimizer state.

    The two numbers of :meth:`impl.canzona.engine.Engine.state_bytes`; where parameters are fp32 they are their own
    masters.  With a ``tp_update`` other than ``exchange`` momentum stays on the shards.
    """
    optimizers = {cost.name: cost for cost in costs}
    masters, state = np.zeros((plan.dp, plan.tp)), np.zeros((plan.dp, plan.tp))
    for family in plan.families:
        optimizer = optimizers[family.optimizer]
        if family.atomic:
            for group in ranks.micro_groups(plan):
                masters += group.local.total(lambda m: 4.0 * m.elements)
                if tp_update == "exchange":
                    state += group.updates.total(lambda m: sum(map(optimizer.state_bytes, m.shapes)))  # noqa: B023
                else:
                    state += group.local.total(lambda m: sum(map(optimizer.state_bytes, m.shards(plan.tp))))  # noqa: B023
            continue
        for rank, runs in enumerate(ranks.elementwise_runs(plan, family)):
            masters[rank] += sum(4 * (run.end - run.start) for run in runs)
            state[rank] += sum(optimizer.state_bytes((run.end - run.start,)) for run in runs)
    return masters, state


def _update_bytes(plan: Plan, tp_update: TpUpdate) -> Array:
    """Return the bytes ``[dp, tp]`` of whole gradients, updates and exchange buffers that live together, at most.

    While group k ends, a rank holds its whole gradients, their updates and the updates packed for their way back, its
    shards of returned updates, what the gather of k + 1 sent and receives, and what the scatter of k - 1 did
    (:func:`impl.canzona.exchange.run_pipelined`).  Without an exchange gradients lie in the flat buffer, so that only
    updates of this group and the one before are held.
    """
    groups, tp = ranks.micro_groups(plan), plan.tp
    if tp_update != "exchange":
        return 4.0 * np.max([g.local.total(lambda m: m.elements) for g in groups], axis=0, initial=0.0)
    nothing = np.zeros((plan.dp, tp))
    sent = [nothing + g.hosted.sum(axis=1, keepdims=True) for g in groups]
    repeated = [tp * g.everywhere for g in groups]
    own = [g.updates.total(lambda m: m.elements if m.tp_dim is None else 0) for g in groups]
    most = nothing
    for k in range(len(groups)):
        now = 3 * tp * groups[k].hosted + sent[k] + 2 * repeated[k] + own[k]
        if k + 1 < len(groups):
            after = groups[k + 1]
            now = now + tp * after.gathered + sent[k + 1] + tp * after.everywhere
        if k > 0:
            now = now + tp * groups[k - 1].hosted + sent[k - 1] + groups[k - 1].everywhere + own[k - 1]
        most = np.maximum(most, now)
    return 4.0 * most


def _staged_bytes(plan: Plan) -> float:
    """Return the bytes of the largest buffer of fp32 gradients whose unequal segments are padded to the largest."""
    sizes = [np.diff(bucket.cuts) for family in plan.families for bucket in family.buckets if bucket.cuts]
    return 4.0 * max((plan.dp * int(s.max()) for s in sizes if s.min() < s.max()), default=0)


def activation_bytes(config: ModelConfig, work: Workload, dp: int, tp: int) -> float:
    """Return the bytes of activations that one rank keeps from the forward of one microbatch to its backward.

    Every layer's (:func:`impl.projection.activations.activation_bytes`), and input and output of the last norm.
    Recompute ``full`` keeps every layer's input, and one layer's all.
    """
    arch, tokens = config.arch, work.rows(dp) * work.sequence
    of_layer = partial(activations.activation_bytes, arch, tokens, work.size, tp)
    parallel = work.sequence_parallel
    head = 2 * of_layer("layer", parallel)
    if work.recompute == "full":
        return arch.num_hidden_layers * of_layer("layer", parallel) + of_layer("none", parallel) + head
    return arch.num_hidden_layers * of_layer(work.recompute, parallel) + head


def logit_bytes(config: ModelConfig, work: Workload, dp: int, tp: int) -> float:
    """Return the bytes of the loss at its worst: fp32 softmax, its fp32 gradient, and that in the model's ``dtype``.

    (:mod:`impl.models.cross_entropy`.)  The vocabulary is padded and cut over TP.
    """
    tokens = work.rows(dp) * work.sequence
    return float(tokens * config.padded_vocab(tp) // tp * (8 + (work.size if work.dtype != "float32" else 0)))
