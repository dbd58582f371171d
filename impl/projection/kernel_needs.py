"""Which kernels a run spends its time in: the cases to measure before it can be projected."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from impl.canzona.buffers import runs_of
from impl.canzona.norm import LIMBS
from impl.canzona.plan import EVERY, Bucket, Family, Plan
from impl.canzona.strategies import make_plan
from impl.errors import ConfigError
from impl.harness import pipeline_run, setup
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.run import Run
from impl.harness.spec import RunSpec
from impl.harness.step_time_spec import StepTimeSpec
from impl.models.catalogue import ModelConfig
from impl.optimizers.base import Optimizer, Shape, create
from impl.optimizers.routing import ELEMENTWISE, is_matrix
from impl.projection.kernel_cases import (
    BlockCase,
    Case,
    CollectiveCase,
    LaunchCase,
    PassCase,
    ProductCase,
    UpdateCase,
)
from impl.projection.kernel_table import settings_digest
from impl.projection.machine import BYTES, Collective

Kind = Literal["layer", "embedding", "head"]

LAYERS = 4
"""Most layers that are run one after the other: enough that no cache keeps weights and gradients of a small model."""
STEP = 4.0
"""Between two neighbouring sizes of a kernel that is interpolated."""


@dataclass
class Needs:
    """Cases of the runs of ``processes`` ranks, gathered run by run; equal ones once.

    Kernels with sizes are measured from the smallest to the largest that is needed, :data:`STEP` apart.
    """

    processes: int
    _fixed: dict[Any, Case] = field(default_factory=dict)
    _rules: dict[str, Optimizer] = field(default_factory=dict)
    _batches: dict[tuple[str, Shape], int] = field(default_factory=dict)
    _sizes: dict[tuple[Any, ...], set[int]] = field(default_factory=lambda: defaultdict(set))
    _piece: int = 1

    def cases(self) -> list[Case]:
        """Return the cases, in the order in which they were added, those with sizes at the end."""
        out = list(self._fixed.values())
        out += [self._update(rule, shape, batch) for (rule, shape), batch in self._batches.items()]
        return out + [self._sized(key, size) for key, sizes in self._sizes.items() for size in _grid(sizes)]

    def block(self, model: str, kind: Kind, tp: int, rows: int, sequence: int, dtype: str, copies: int = 1) -> None:
        """Add a part of a model; of several numbers of copies the largest counts, up to :data:`LAYERS`."""
        copies = min(copies, LAYERS)
        case = BlockCase(model=model, kind=kind, tp=tp, rows=rows, sequence=sequence, dtype=dtype, copies=copies)
        known = self._fixed.get(key := case.names()[0])
        if not isinstance(known, BlockCase) or known.copies < copies:
            self._fixed[key] = case

    def update(self, rule: Optimizer, shape: Shape, batch: int) -> None:
        """Add an update; of several batches the smallest counts, that of the rank with the least."""
        if not math.prod(shape):
            return  # a rank without a part of this family
        name = f"{rule.name} {settings_digest(rule)}"
        self._rules.setdefault(name, rule)
        if rule.atomic:
            self._batches[name, shape] = min(self._batches.get((name, shape), batch), batch)
        else:
            self._sizes["update", name].add(math.prod(shape))

    def passes(self, kernel: str, dtype: str, sizes: Iterable[int], piece: int) -> None:
        """Add ``apply``, ``norm`` and the like; the largest ``piece`` of all counts."""
        self._piece = max(self._piece, piece)
        self._sizes["pass", kernel, dtype] |= {size for size in sizes if size > 0}

    def collective(self, kind: Collective, ranks: int, size: float, *, even: bool = True) -> None:
        """Add a collective of ``size`` bytes."""
        if ranks > 1 and size > 0:
            self._sizes["collective", kind, ranks, even].add(math.ceil(size))

    def product(self, m: int, n: int, k: int, dtype: str) -> None:
        """Add a matrix product."""
        case = ProductCase(m=m, n=n, k=k, dtype=dtype)
        self._fixed[case.names()[0]] = case

    def launch(self) -> None:
        """Add the time of a launch."""
        self._fixed["launch"] = LaunchCase()

    def _update(self, name: str, shape: Shape, batch: int = 1) -> Case:
        rule = self._rules[name]
        settings = rule.hyper.model_dump(mode="json")
        return UpdateCase(optimizer=rule.name, settings=settings, shape=shape, batch=batch)

    def _sized(self, key: tuple[Any, ...], size: int) -> Case:
        what, *rest = key
        if what == "update":
            return self._update(rest[0], (size,))
        if what == "pass":
            return PassCase(case=rest[0], dtype=rest[1], size=size, piece=self._piece)
        return CollectiveCase(kind=rest[0], ranks=rest[1], even=rest[2], size=size)


def _grid(sizes: set[int]) -> list[int]:
    """Return sizes from the smallest to the largest at most :data:`STEP` apart."""
    low, high = min(sizes), max(sizes)
    if len(sizes) < 3 and high <= STEP * low:
        return sorted(sizes)
    count = max(1, math.ceil(math.log(high / low) / math.log(STEP)))
    return sorted({round(low * (high / low) ** (i / count)) for i in range(count + 1)})


def of_runs(runs: Sequence[Run], cores: int | None = None) -> dict[int, Needs]:
    """Return what ``runs`` of step-time and pipeline experiments need, by their number of ranks.

    cores: that all ranks share.  Stages of a pipeline take turns, so that no more of them than cores need be busy at
        the same time; the ranks of a training step all are.

    Raises :class:`ConfigError` for runs of another kind.
    """
    found: dict[int, Needs] = {}
    for run in runs:
        spec = run.spec
        if not isinstance(spec, StepTimeSpec | PipelineSpec):
            raise ConfigError(
                f"{run.name} is a run of {run.command}: only step-time and pipeline experiments are timed"
            )
        busy = spec.world_size
        if isinstance(spec, PipelineSpec) and cores is not None:
            busy = min(busy, cores)
        needs = found.setdefault(busy, Needs(busy))
        if isinstance(spec, StepTimeSpec):
            for system in spec.systems:
                _training(needs, system.run_spec(spec.base))
        else:
            _pipeline(needs, spec)
    return found


def _training(needs: Needs, spec: RunSpec) -> None:
    made = setup.prepare(spec)
    layers, rows = made.model.arch.num_hidden_layers, spec.local_batch
    kinds: dict[Kind, int] = {"layer": layers, "embedding": 1, "head": 1}
    for kind, copies in kinds.items():
        needs.block(spec.model, kind, spec.tp, rows, spec.sequence, spec.dtype, copies)
    of_plan(needs, made.plan, made.optimizers, spec.dtype)
    activations = rows * spec.sequence * made.model.arch.hidden_size * BYTES[spec.dtype]
    for size in (activations, 4 * rows * spec.sequence):  # of layers; of the loss
        needs.collective("all-reduce", spec.tp, size)


def _pipeline(needs: Needs, spec: PipelineSpec) -> None:
    made = pipeline_run.prepare(spec)
    own = spec.batch // spec.replicas
    microbatches = sorted({own // made.microbatches, -(-own // made.microbatches)})
    for context, part in zip(made.contexts, made.parts, strict=True):
        matrix, elementwise = made.method.matrix_optimizer(context), made.method.elementwise_optimizer(context)
        parameters = made.model.parameters(1, part)
        costs = [matrix if is_matrix(parameter) else elementwise for parameter in parameters]
        plan = make_plan("canzona", parameters, costs, spec.replicas, 1)
        of_plan(needs, plan, {rule.name: rule for rule in (matrix, elementwise)}, "float32")
        weights = 4 * sum(p.numel for p in parameters)
        needs.passes("copy", "float32", [weights], max(p.numel for p in parameters))
        for rows in microbatches:
            kinds: dict[Kind, int] = {"layer": part.layers, "embedding": int(part.embedding), "head": int(part.head)}
            for kind, copies in kinds.items():
                if copies:
                    needs.block(spec.model, kind, 1, rows, spec.sequence, "float32", copies)
            if spec.stages > 1:
                needs.collective("send", 2, 4 * rows * spec.sequence * made.model.arch.hidden_size)


def of_plan(needs: Needs, plan: Plan, optimizers: Mapping[str, Optimizer], dtype: str) -> None:
    """Add what the optimizer step and the collectives of ``plan`` need."""
    for family in plan.families:
        rule = optimizers[family.optimizer]
        largest = max(slot.end - slot.start for slot in family.slots)
        for rank in range(plan.dp):
            sizes = [run.end - run.start for run in runs_of(plan, family, rank)]
            spans = [*sizes, sum(sizes)]
            needs.passes("apply", dtype, spans, largest)
            needs.passes("norm", "float32", spans, largest)
            if not family.atomic:
                needs.passes("norm-exact", "float32", spans, largest)
                for size in spans:
                    needs.update(rule, (size,), 1)
        if family.atomic:
            for shape, batch in _batches(plan, family).items():
                needs.update(rule, shape, batch)
        for bucket in family.buckets:
            _reductions(needs, plan, family, bucket, dtype)
    gathered = sum(
        piece.end - piece.start
        for family in plan.families
        if family.synchronization == "once"
        for rank in range(plan.dp)
        for piece in family.pieces(rank)
    )
    needs.collective("all-gather", plan.dp, BYTES[dtype] * gathered, even=False)
    needs.collective("all-reduce", plan.dp * plan.tp, 8 * (len(plan.parameters) * plan.tp + LIMBS))
    _exchanges(needs, plan)


def _batches(plan: Plan, family: Family) -> Counter[tuple[int, ...]]:
    """Return how many matrices of each shape the least loaded host updates in one call."""
    least: Counter[tuple[int, ...]] = Counter()
    members = {slot.parameter for slot in family.slots}
    for groups in plan.micro_groups:
        for group in groups:
            for host in range(plan.tp):
                mine = Counter(
                    shape
                    for parameter, owner in zip(group.parameters, group.hosts, strict=True)
                    if parameter in members and owner in (host, EVERY)
                    for shape in plan.parameters[parameter].matrices
                )
                for shape, count in mine.items():
                    least[shape] = min(least.get(shape, count), count)
    return least


def _reductions(needs: Needs, plan: Plan, family: Family, bucket: Bucket, dtype: str) -> None:
    elements = bucket.end - bucket.start
    if not bucket.cuts:
        needs.collective("all-reduce", plan.dp, 4 * elements)
        return
    even = len({high - low for low, high in pairwise(bucket.cuts)}) == 1
    segments = bucket.cuts[-1] - bucket.cuts[0]
    needs.collective("reduce-scatter", plan.dp, 4 * segments, even=even)
    if family.synchronization == "per-bucket":
        needs.collective("all-gather", plan.dp, BYTES[dtype] * segments, even=even)


def _exchanges(needs: Needs, plan: Plan) -> None:
    """Add the all-to-alls of the micro-groups, and the sum of partial gradients."""
    if plan.tp == 1:
        return
    partial = sum(spec.local_numel(plan.tp) for spec in plan.parameters if spec.partial_over_tp)
    needs.collective("all-gather", plan.tp, 4 * plan.tp * partial)
    for group in (group for groups in plan.micro_groups for group in groups):
        cut = [i for i in group.parameters if plan.parameters[i].tp_dim is not None]
        sizes = [4 * plan.parameters[i].local_numel(plan.tp) for i in cut]
        hosts = dict(zip(group.parameters, group.hosts, strict=True))
        for rank in range(plan.tp):
            away = sum(s for i, s in zip(cut, sizes, strict=True) if hosts[i] not in (rank, EVERY))
            everywhere = (plan.tp - 1) * sum(s for i, s in zip(cut, sizes, strict=True) if hosts[i] == EVERY)
            back = (plan.tp - 1) * sum(s for i, s in zip(cut, sizes, strict=True) if hosts[i] == rank)
            for size in (away + everywhere, back):
                needs.collective("all-to-all", plan.tp, size)


def of_model(config: ModelConfig, optimizers: Sequence[str], *, tp: int, rows: int = 1, sequence: int = 4096) -> Needs:
    """Return the full-scale kernels of ``config`` on one device, in the order of their use.

    Updates are of whole matrices, one at a time; with passes and copies they replace a projection's roofline.  Products
    of activations and weights, of a tensor-parallel shard, and launches enter no projection: they stand in the table
    to check what ``experiments/hardware`` assumes that products reach of the peak, and that a launch takes.
    """
    needs = Needs(1)
    parameters = config.parameters(tp)
    matrices = Counter(s for p in parameters if is_matrix(p) for s in p.matrices)
    needs.launch()
    for p in parameters:
        if is_matrix(p) and p.name.startswith("decoder.layers.0."):
            out, inside = p.local_shape(tp)
            needs.product(rows * sequence, out, inside, "bfloat16")
    for name in dict.fromkeys([*optimizers, ELEMENTWISE]):
        rule = create(name)
        for shape in matrices:
            needs.update(rule, shape, 1)
    whole = sorted({math.prod(shape) for shape in matrices})
    for kernel, dtype in (("apply", "bfloat16"), ("norm", "float32"), ("norm-exact", "float32")):
        needs.passes(kernel, dtype, [whole[0] // 64, whole[0], whole[-1]], whole[-1])
    for kernel in ("copy", "copy-from-host"):
        needs.passes(kernel, "float32", [2**20, 2**27], whole[-1])
    return needs
