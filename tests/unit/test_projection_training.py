"""The timeline of a training step: its critical path, its communication, and its order, each computed independently."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from impl.canzona.buffers import runs_of
from impl.canzona.norm import vector_length
from impl.canzona.plan import EVERY
from impl.canzona.strategies import PlanOptions
from impl.errors import ConfigError
from impl.harness.planning import Planned, plan_workload, workload
from impl.models import catalogue
from impl.models.catalogue import ModelConfig
from impl.optimizers.base import create
from impl.projection import hardware
from impl.projection.hardware import Group, HardwareSpec
from impl.projection.machine import Block, Machine, Roofline
from impl.projection.ranks import Amounts, GroupWork, Matrix
from impl.projection.steady import Step
from impl.projection.timeline import SLOWER
from impl.projection.training import Projection, Workload, model_flops, peak_flops, project
from impl.projection.uncertain import DRAWS, Cost, band
from impl.projection.updates import GramMuon, Updates
from impl.projection.workload import talks
from tests.unit.fake_machines import Altered, Plain, free

TINY = catalogue.load("qwen3-tiny", layers=4)
REAL = catalogue.load("qwen3-1.7b", layers=6)
SYSTEMS = [("sc", "lpt-ns"), ("asc", "lpt-ns"), ("canzona", "lpt-ns"), ("nv-layerwise", "ping-pong"),
           ("nv-layerwise", "lpt-numel"), ("nv-layerwise", "lpt-ns")]  # fmt: skip
MACHINE = Roofline(hardware.load("h100x64"))


def planned(
    system: tuple[str, str], dp: int = 4, tp: int = 2, config: ModelConfig = REAL, optimizer: str = "muon", **more: Any
) -> Planned:
    strategy, version = system
    settings = {"bucket_elements": 30_000_000, "capacity_bytes": 60_000_000, "fallback": False} | more
    options = PlanOptions(nv_version=version, **settings)  # type: ignore[arg-type]
    return plan_workload(workload(config, optimizer, tp, options=options), strategy, dp, options)


def projected(made: Planned, machine: Machine = MACHINE, config: ModelConfig = REAL, **more: Any) -> Projection:
    keys = ("tp_update", "uneven")
    work = Workload(**{"batch": 8, "sequence": 512} | {k: v for k, v in more.items() if k not in keys})
    return project(made.plan, made.costs, config, work, machine, **{k: v for k, v in more.items() if k in keys})


def optimizer_ends(made: Planned, machine: Machine, dtype: str = "bfloat16") -> np.ndarray:
    """Return when each rank ends its optimizer step ``[dp, tp]`` if nothing takes time on the network, in plain loops.

    A gather or scatter ends when the last rank of the TP group has reached it.
    """
    plan = made.plan
    rules = {cost.name: cost for cost in made.costs}
    ends = np.zeros((plan.dp, plan.tp))
    for family in plan.families:
        rule = rules[family.optimizer]
        for d in range(plan.dp):
            if not family.atomic:
                for run in runs_of(plan, family, d):
                    n = run.end - run.start
                    ends[d] += machine.update(rule, (n,)).seconds[0] + machine.apply(n, dtype).seconds[0]
                continue
            now, met, before, landing = ends[d].copy(), 0.0, 0.0, 0.0  # met: when the gather of this group ended
            for k, group in enumerate(plan.micro_groups[d]):
                exchanged = any(plan.parameters[p].tp_dim is not None for p in group.parameters) and plan.tp > 1
                if exchanged:
                    now = np.maximum(now, max(met, now.max()) if k == 0 else met)
                following = now.max()
                steps = 0.0
                for p, host in zip(group.parameters, group.hosts, strict=True):
                    spec = plan.parameters[p]
                    seconds = sum(machine.update(rule, shape).seconds[0] for shape in spec.matrices)
                    now[slice(None) if host == EVERY or spec.tp_dim is None else host] += seconds
                    steps += machine.apply(spec.local_numel(plan.tp), dtype).seconds[0]
                scattered = now.max() if any(h != EVERY for h in group.hosts) and exchanged else 0.0
                if k > 0:
                    now = np.maximum(now, before) + landing
                before, landing, met = scattered, steps, max(following, before)
            if plan.micro_groups[d]:
                now = np.maximum(now, before) + landing
            ends[d] = now
    return ends


def model_seconds(config: ModelConfig, work: Workload, dp: int, tp: int, machine: Machine) -> float:
    parts = [("embedding", 1), ("layer", config.arch.num_hidden_layers), ("head", 1)]
    once = whole_step = 0.0
    for kind, count in parts:
        share = tp if work.sequence_parallel else 1
        block = Block(config.arch, kind, tp, work.rows(dp), work.sequence, work.dtype, share)  # type: ignore[arg-type]
        once += count * (machine.forward(block).seconds[0] + machine.backward(block).seconds[0])
        whole_step += count * machine.gradients(block).seconds[0]
    return once * work.microbatches + whole_step


def norm_seconds(made: Planned, machine: Machine) -> float:
    """Return the longest sum of squares: what a rank owns, counting repeated and replicated parameters on one rank."""
    plan, most = made.plan, 0.0
    for d in range(plan.dp):
        for t in range(plan.tp):
            counts = {True: 0, False: 0}
            for family in plan.families:
                for piece in family.pieces(d):
                    owner = next(s.owner for s in family.slots if s.parameter == piece.parameter)
                    spec = plan.parameters[piece.parameter]
                    if not (owner == EVERY and d) and not (spec.tp_dim is None and t):
                        counts[family.atomic] += piece.end - piece.start
            seconds = sum(machine.norm(n, exact=not atomic).seconds[0] for atomic, n in counts.items())
            most = max(most, seconds)
    return most


def test_waiting_for_a_slow_owner_is_imbalance_not_communication() -> None:
    machine, work = Altered(MACHINE, network=free), {"batch": 12, "sequence": 512}
    found = projected(planned(("asc", "lpt-ns"), 4, 1), machine, **work)
    assert found.exposed_communication.max() == 0
    slowest = found.optimizer_step[0]
    assert 0.1 * slowest < found.waiting_for_ranks[0] <= slowest
    even = projected(planned(("canzona", "lpt-ns"), 4, 1), machine, **work)
    assert even.waiting_for_ranks[0] < 0.8 * found.waiting_for_ranks[0]
    assert found.evidence("param_sync") == {SLOWER: 1.0}


@pytest.mark.parametrize("system", SYSTEMS, ids="-".join)
@pytest.mark.parametrize(("dp", "tp", "microbatches"), [(1, 1, 2), (4, 1, 1), (1, 4, 1), (4, 2, 2), (3, 4, 1)])
def test_an_infinitely_fast_network_leaves_the_compute_critical_path(
    system: tuple[str, str], dp: int, tp: int, microbatches: int
) -> None:
    made = planned(system, dp, tp)
    machine = Altered(MACHINE, network=free)
    work = Workload(batch=12 * microbatches, sequence=512, microbatches=microbatches)
    found = project(made.plan, made.costs, REAL, work, machine)
    ends = optimizer_ends(made, machine)
    expected = ends.max() + model_seconds(REAL, work, dp, tp, machine) + norm_seconds(made, machine)
    assert found.iteration[0] == pytest.approx(expected, rel=1e-9)
    assert found.optimizer_step[0] == pytest.approx(ends.max(), rel=1e-9)
    slower = projected(made, MACHINE, batch=12 * microbatches, microbatches=microbatches)
    if dp * tp > 1:
        assert slower.iteration[0] > expected * 1.001, "negative control: a real network takes time"


def communication_seconds(made: Planned, config: ModelConfig, work: Workload, machine: Machine) -> float:
    """Return how long a step's communication takes if nothing else takes time, in plain loops."""
    plan, dp, tp = made.plan, made.plan.dp, made.plan.tp
    over_tp, over_dp = Group(tp), Group(dp, tp)

    def cost(kind: Any, sizes: list[float], group: Group) -> float:
        return machine.collective(kind, sizes, group).seconds[0]

    now = 0.0
    for groups in plan.micro_groups:
        spent = 0.0
        for group in groups if tp > 1 else ():
            cut = [(plan.parameters[p].local_numel(tp), h) for p, h in zip(group.parameters, group.hosts, strict=True)
                   if plan.parameters[p].tp_dim is not None]  # fmt: skip
            there = [sum(n for n, h in cut if h in (t, EVERY)) for t in range(tp)]
            back = [sum(n for n, h in cut if h == t) for t in range(tp)]
            for received in (there, back):
                busiest = max(4 * max(sum(received) - n, (tp - 1) * n) for n in received)
                spent += cost("all-to-all", [busiest], over_tp)
        now = max(now, spent)
    buckets = [(f, b) for f in plan.families for b in f.buckets]
    first = {id(b): min(s.parameter for s in b.slots) for _, b in buckets}
    size = 2 if work.dtype == "bfloat16" else 4

    def lengths(cuts: Any, each: int) -> list[float]:
        return [float(each * (b - a)) for a, b in pairwise(cuts)]

    ready, at = {}, now
    if dp > 1:
        for family, bucket in sorted(buckets, key=lambda item: first[id(item[1])]):
            if family.synchronization == "per-bucket":
                at += cost("all-gather", lengths(bucket.cuts, size), over_dp)
                ready[id(bucket)] = at
        if any(f.synchronization == "once" for f in plan.families):
            owned = [sum(p.end - p.start for f in plan.families for p in f.pieces(r)) for r in range(dp)]
            now += cost("all-gather", [float(size * n) for n in owned], over_dp)
    blocks = config.arch.num_hidden_layers + 2

    def place(parameter: int) -> int:
        name = plan.parameters[parameter].name
        return 0 if "embedding" in name else int(name.split(".")[2]) + 1 if ".layers." in name else blocks - 1

    tokens = work.rows(dp) * work.sequence
    hidden = float(size * tokens * config.arch.hidden_size)
    reduce = cost("all-reduce", [hidden], over_tp)
    loss = sum(cost("all-reduce", [n * 4.0 * tokens], over_tp) for n in (1, 2))
    for block in range(blocks):
        for _, bucket in buckets:
            if id(bucket) in ready and any(place(s.parameter) == block for s in bucket.slots):
                now = max(now, ready[id(bucket)])
        now += loss if block == blocks - 1 else reduce * (2 if block else 1)
    flying = now
    due = sorted(buckets, key=lambda item: -first[id(item[1])]) if dp > 1 else []
    for block in reversed(range(blocks)):
        while due and min(place(s.parameter) for s in due[0][1].slots) >= block:
            _, bucket = due.pop(0)
            kind = ("reduce-scatter", lengths(bucket.cuts, 4)) if bucket.cuts else None
            kind = kind or ("all-reduce", [4.0 * (bucket.end - bucket.start)])
            flying = max(flying, now) + cost(*kind, over_dp)
        now += reduce * (1 if block == blocks - 1 else 2 if block else 0)
    now = max(now, flying)
    partial = [sum(p.end - p.start for f in plan.families for p in f.pieces(r)
                   if plan.parameters[p.parameter].partial_over_tp) for r in range(dp)]  # fmt: skip
    now += max(cost("all-gather", [4.0 * n] * tp, over_tp) for n in partial)
    return now + cost("all-reduce", [8.0 * vector_length(plan)], Group(dp * tp))


@pytest.mark.parametrize("system", SYSTEMS, ids="-".join)
@pytest.mark.parametrize(("dp", "tp"), [(4, 1), (1, 4), (4, 2), (3, 4)])
def test_infinitely_fast_compute_leaves_the_communication(system: tuple[str, str], dp: int, tp: int) -> None:
    made = planned(system, dp, tp)
    machine = Altered(MACHINE, compute=free)
    work = Workload(batch=12, sequence=512, sequence_parallel=False)
    found = project(made.plan, made.costs, REAL, work, machine)
    expected = communication_seconds(made, REAL, work, MACHINE)
    assert found.iteration[0] == pytest.approx(expected, rel=1e-9)
    # ranks whose own exchange is short wait for others in the next collective over DP
    most = found.exposed_communication[0]
    assert most <= expected * (1 + 1e-9)
    assert most + found.waiting_for_ranks[0] >= expected * (1 - 1e-9)
    assert project(made.plan, made.costs, REAL, work, MACHINE).iteration[0] > expected, "negative control"


@pytest.mark.parametrize("system", SYSTEMS, ids="-".join)
def test_more_bandwidth_is_never_slower(system: tuple[str, str]) -> None:
    made = planned(system)
    spec = MACHINE.hardware.spec.model_dump()
    before = projected(made)
    for link in ("network", "node"):
        faster = {**spec, link: {**spec[link], "bandwidth": 1.5 * spec[link]["bandwidth"]}}
        after = projected(made, Roofline(hardware.Hardware("h100x64", HardwareSpec(**faster), 64)))
        assert (after.iteration <= before.iteration + 1e-12).all()
        slower = {**spec, link: {**spec[link], "latency": 10 * spec[link]["latency"]}}
        after = projected(made, Roofline(hardware.Hardware("h100x64", HardwareSpec(**slower), 64)))
        assert (after.iteration >= before.iteration - 1e-12).all()


def test_no_stream_overlaps_itself_in_a_whole_step() -> None:
    for system in SYSTEMS:
        timeline = projected(planned(system), microbatches=2).timeline
        for stream in {op.stream for op in timeline.ops}:
            ops = [op for op in timeline.ops if op.stream == stream]
            assert all((b.start >= a.end - 1e-12).all() for a, b in pairwise(ops)), (system, stream)


def test_all_ranks_know_the_norm_at_the_same_time() -> None:
    for system in SYSTEMS:
        timeline = projected(planned(system)).timeline
        ends = np.broadcast_to(timeline.free("compute"), (1 + DRAWS, *timeline.mesh))
        assert (ends == ends[:, :1, :1]).all(), "the next step begins there"
        busy = np.broadcast_to(sum(op.seconds for op in timeline.ops if op.stream == "compute"), ends.shape)
        assert np.allclose(busy, ends), "a compute stream works or waits, it never idles"


def test_exchanges_count_the_larger_of_sent_and_received() -> None:
    """Four ranks, hosts of 10, 0, 2 and 4 elements, and 1 element that all of them compute."""
    group = GroupWork((1, 4))
    group.hosted[0] = [10, 0, 2, 4]
    group.everywhere[0] = 1
    # gather: rank r sends what the others host and the shared one three times, and receives three times its own
    assert group.gather_bytes.tolist() == [[4 * 33, 4 * 19, 4 * 17, 4 * 15]]
    assert group.scatter_bytes.tolist() == [[4 * 30, 4 * 16, 4 * 14, 4 * 12]]


def updates_of(found: Projection) -> float:
    """Return the seconds of matrix updates summed over all ranks."""
    ops = [op for op in found.timeline.ops if op.name.startswith("muon")]
    return sum(float(np.broadcast_to(op.seconds[0], found.timeline.mesh).sum()) for op in ops)


def test_synchronous_compute_does_the_work_of_all_ranks_on_each() -> None:
    dp, tp = 4, 2
    sc, asc, canzona, nv = (updates_of(projected(planned(s, dp, tp))) for s in SYSTEMS[:4])
    assert sc == pytest.approx(dp * tp * canzona)
    assert asc == pytest.approx(canzona)
    assert nv == pytest.approx(tp * canzona), "NV-layerwise repeats it on every TP rank"


def three_groups() -> list[GroupWork]:
    """Return groups of one DP rank on two TP ranks: rank 0 computes 5, 1, 4; rank 1 computes 2, 6, 1."""
    out = []
    for first, second in ((5, 2), (1, 6), (4, 1)):
        group = GroupWork((1, 2))
        for host, rows in enumerate((first, second)):
            group.updates.add(Matrix(((rows, 1),), 0, 1), (0, host))
            group.hosted[0, host] += 0.25  # elements: each exchange moves one byte
        group.local.add(Matrix(((1, 1),), 0, 1), (0,))
        out.append(group)
    return out


def test_micro_groups_are_pipelined_in_the_engines_order() -> None:
    """By hand, exchanges of one second each on the TP stream (G gather, S scatter, C compute):

    G0 0-1; then G1 1-2 under C0 (rank 0: 1-6, rank 1: 1-3); S0 starts with the later rank: 6-7.
    G1 is there; G2 is issued at 6 on rank 0, at 3 on rank 1, and S0 was issued at the same place just before: S0 6-7,
    G2 7-8.  C1: rank 0 6-7, rank 1 3-9.  S1 meets at 9: 9-10.  Rank 0 waits for S0 (there), applies; then G2 is there.
    C2: rank 0 8-12 (after G2), rank 1 9-10.  S2 meets at 12: 12-13.  The end is 13 on both.
    """
    made = planned(("canzona", "lpt-ns"), 1, 2, TINY)
    step = Step(made.plan, made.costs, TINY, Workload(batch=1), Plain())
    step._pipelined(three_groups(), Updates(step.machine, create("muon"), 2))
    times = {op.name: (op.start[0, 0], op.end[0, 0]) for op in step.timeline.ops if not op.waiting}
    at = {name: (np.broadcast_to(a, 2).tolist(), np.broadcast_to(b, 2).tolist()) for name, (a, b) in times.items()}
    assert at["gather 0"] == ([0, 0], [1, 1])
    assert at["gather 1"] == ([1, 1], [2, 2])
    assert at["muon, group 0"] == ([1, 1], [6, 3])
    assert at["scatter 0"] == ([6, 6], [7, 7])
    assert at["gather 2"] == ([7, 7], [8, 8])
    assert at["muon, group 1"] == ([6, 3], [7, 9])
    assert at["scatter 1"] == ([9, 9], [10, 10])
    assert at["muon, group 2"] == ([8, 9], [12, 10])
    assert at["scatter 2"] == ([12, 12], [13, 13])
    assert step.timeline.end()[0] == 13
    order = [op.name for op in step.timeline.ops if op.stream == "tp"]
    assert order == ["gather 0", "gather 1", "scatter 0", "gather 2", "scatter 1", "scatter 2"]


def test_on_a_cpu_nothing_is_hidden() -> None:
    made = planned(("canzona", "lpt-ns"), 1, 2, TINY)
    step = Step(made.plan, made.costs, TINY, Workload(batch=1), Plain(shared=True))
    step._pipelined(three_groups(), Updates(step.machine, create("muon"), 2))
    assert {op.stream for op in step.timeline.ops} == {"compute"}
    # rank by rank: G0 1, G1 2, C0 7 | 4, S0 8, G2 9 (met), C1 10 | 15, S1 16, C2 20 | 17, S2 21
    assert step.timeline.end()[0] == 21
    whole = [projected(planned(s), Altered(MACHINE, shared=shared)) for s in SYSTEMS for shared in (False, True)]
    for apart, shared in zip(whole[::2], whole[1::2], strict=True):
        assert (shared.iteration > apart.iteration).all()


def test_blockwise_and_distributed_updates_of_muon() -> None:
    made = planned(("nv-layerwise", "ping-pong"))
    exchange, blockwise, gram = (projected(made, tp_update=m) for m in ("exchange", "blockwise", "distributed"))
    assert "tp_exchange" not in blockwise.phases
    assert blockwise.optimizer_step[0] < gram.optimizer_step[0] < exchange.optimizer_step[0]
    settings, tp = create("muon").hyper, 2
    count = dict.fromkeys(range(4), 0)
    for rank, groups in enumerate(made.plan.micro_groups):
        for p in (p for group in groups for p in group.parameters):
            spec = made.plan.parameters[p]
            assert spec.tp_dim is not None
            uncut = spec.shape[1 - spec.tp_dim]
            count[rank] += settings.ns_steps * round(2 * (tp - 1) / tp * 2 * uncut**2)  # type: ignore[attr-defined]
    assert gram.timeline.bytes()["tp_exchange"]["tp"] == max(count.values())
    with pytest.raises(ConfigError, match="--tp-update blockwise is for muon: soap needs exchange"):
        projected(planned(("canzona", "lpt-ns"), optimizer="soap"), tp_update="blockwise")


def test_gram_products_on_shards_are_the_whole_matrix_work_but_for_the_repeated_square() -> None:
    rule = create("muon")
    shape, tp = (4096, 1024), 4
    gram = GramMuon(rule.hyper)
    shards = tp * gram.flops((1024, 4096 // tp))
    assert shards == rule.flops(shape) + (tp - 1) * 5 * 2 * 1024**3
    assert gram.name != rule.name, "kernel tables and caches tell them apart"
    matrix = Matrix(((4096, 1024),), 0, 1024 * 1024)
    assert Updates(MACHINE, rule, tp, "distributed").gram_bytes(matrix) == [2 * 1024**2] * 5


def test_padded_collectives_take_longer_than_a_perfect_chain() -> None:
    made = planned(("canzona", "lpt-ns"))
    rooted, padded = (projected(made, uneven=u) for u in ("rooted", "padded"))
    assert padded.timeline.bytes()["grad_reduce"]["dp"] > rooted.timeline.bytes()["grad_reduce"]["dp"]
    assert padded.iteration[0] != rooted.iteration[0]
    even = planned(("nv-layerwise", "lpt-ns"))
    assert np.array_equal(projected(even, uneven="padded").iteration, projected(even).iteration)


def test_permuted_draws_give_permuted_answers() -> None:
    order = np.concatenate([[0], 1 + np.random.default_rng(0).permutation(DRAWS)])

    def permute(cost: Cost) -> Cost:
        return dataclasses.replace(cost, seconds=cost.seconds[order])

    made = planned(("asc", "lpt-ns"))
    plain, mixed = projected(made), projected(made, Altered(MACHINE, permute, permute))
    assert np.allclose(mixed.iteration, plain.iteration[order])
    assert not np.allclose(mixed.iteration, plain.iteration), "negative control: the draws differ"
    one, other = band(plain.optimizer), band(mixed.optimizer)
    assert (one.low, one.value, one.high) == pytest.approx((other.low, other.value, other.high))


def test_microbatches_and_recomputation_cost_what_they_add() -> None:
    made = planned(("canzona", "lpt-ns"), 4, 1)
    machine = Altered(MACHINE, network=free)
    none, attention, full = (projected(made, machine, recompute=r) for r in ("none", "selective-attention", "full"))
    block = Block(REAL.arch, "layer", 1, 2, 512, "bfloat16")
    layers = REAL.arch.num_hidden_layers
    extra = layers * machine.forward(block).seconds
    assert np.allclose(full.iteration - none.iteration, extra)
    extra = layers * machine.attention(block).seconds
    assert np.allclose(attention.iteration - none.iteration, extra)
    one, two = projected(made, machine, batch=8), projected(made, machine, batch=16, microbatches=2)
    kinds = {"embedding": 1, "layer": layers, "head": 1}
    blocks = [(Block(REAL.arch, kind, 1, 2, 512, "bfloat16"), count) for kind, count in kinds.items()]  # type: ignore[arg-type]
    once = sum(count * machine.gradients(one_of).seconds for one_of, count in blocks)  # zero and scale: once a step
    assert np.allclose(two.iteration - one.iteration, one.phases["forward"] + one.phases["backward"] - once)
    with pytest.raises(ConfigError, match="batch 6 is not a multiple of dp x microbatches"):
        projected(made, batch=6)


def test_sequence_parallelism_moves_the_same_volume_of_a_layer() -> None:
    block = Block(REAL.arch, "layer", 4, 2, 512, "bfloat16")
    hidden = 2 * 1024 * REAL.arch.hidden_size
    for direction in ("forward", "backward"):
        plain, parallel = (talks(block, Workload(sequence_parallel=on), direction) for on in (False, True))
        assert [t.kind for t in plain] == ["all-reduce"] * 2
        assert sorted(t.kind for t in parallel) == ["all-gather", "all-gather", "reduce-scatter", "reduce-scatter"]
        counted = [sum(t.counted(4) for t in some) for some in (plain, parallel)]
        assert counted[0] == counted[1] == 2 * 2 * 3 / 4 * hidden
    assert talks(dataclasses.replace(block, tp=1), Workload(), "forward") == []


def test_derived_numbers() -> None:
    made = planned(("canzona", "lpt-ns"))
    found = projected(made)
    assert np.allclose(found.tokens_per_s, 8 * 512 / found.iteration)
    table = REAL.padded_vocab(1) * REAL.arch.hidden_size
    vectors = sum(p.numel for p in REAL.parameters(1) if len(p.shape) == 1)
    matrices = sum(p.numel for p in REAL.parameters(1)) - vectors - table
    head = REAL.arch.vocab_size * REAL.arch.hidden_size
    attention = 3 * 2 * 4096 * 512 * REAL.arch.num_attention_heads * REAL.arch.head_dim * REAL.arch.num_hidden_layers
    assert model_flops(REAL, found.work) == pytest.approx(6 * 4096 * (matrices + head) + attention)
    assert found.mfu is not None
    assert found.mfu[0] == pytest.approx(found.flops / found.iteration[0] / 8 / 989.4e12)
    assert projected(made, Altered(MACHINE)).mfu is None, "no peak is known of another machine"
    assert peak_flops(MACHINE) == 989.4e12
    for name in ("iteration", "forward_backward", "optimizer", "exposed_communication", *found.phases):
        assert sum(found.evidence(name).values()) == pytest.approx(1), name


def test_a_gather_at_once_belongs_to_the_published_optimizer_step() -> None:
    once = projected(planned(("nv-layerwise", "ping-pong")))
    (gather,) = (op for op in once.timeline.ops if op.name == "gather all parameters")
    assert np.allclose(once.optimizer, once.optimizer_step + gather.seconds.max(axis=(1, 2))), (
        "the slowest waits for it"
    )
    assert (once.parameter_gather >= gather.seconds.max(axis=(1, 2)) - 1e-12).all(), "the others for the slowest too"
    hidden = projected(planned(("canzona", "lpt-ns")))
    assert hidden.parameter_gather.max() == 0
    assert np.array_equal(hidden.optimizer, hidden.optimizer_step)


def test_amounts_collapse_axes_on_which_ranks_agree() -> None:
    amounts = Amounts((2, 3))
    amounts.add("a", (slice(None),), 2)
    seconds, evidence = amounts.cost(lambda _: Cost.of(np.full(1 + DRAWS, 3.0), "s"))
    assert seconds.shape == (1 + DRAWS, 1, 1)
    assert seconds[0, 0, 0] == 6
    assert evidence == {"s": 1.0}
    amounts.add("b", (0, slice(None)))
    seconds, _ = amounts.cost(lambda key: Cost.of(np.full(1 + DRAWS, 3.0 if key == "a" else 1.0), key))
    assert seconds.shape == (1 + DRAWS, 2, 1)
    assert seconds[0, :, 0].tolist() == [7, 6]
