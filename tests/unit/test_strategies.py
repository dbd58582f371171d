"""Who owns what under each strategy: properties on random models, literal twins of the rules, NVIDIA's own cases."""

import math
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines import nv_layerwise as nv
from impl.canzona.balance import report
from impl.canzona.layout import lay_out, own_whole
from impl.canzona.partition import alpha_cuts, start_index_cuts
from impl.canzona.plan import EVERY
from impl.canzona.strategies import PlanOptions, Problem, make_plan, registry
from impl.errors import ConfigError
from impl.models.parameters import ParamSpec


@dataclass(frozen=True)
class Toy:
    """A cost with no torch behind it."""

    name: str = "toy"
    atomic: bool = True

    def flops(self, shape):
        return float(max(shape) * min(shape) ** 2) if len(shape) == 2 else 0.0

    published_flops = flops

    def state_bytes(self, shape):
        return 4 * shape[0] * shape[0]


MATRIX, VECTOR = Toy(), Toy("plain", atomic=False)


def problem(shapes, dp, tp=1, vectors=(), **options):
    """Matrices ``[m, n]`` with rows cut over TP if they divide, then vectors."""
    matrices = [ParamSpec(f"w{i}", s, tp_dim=0 if s[0] % tp == 0 else None) for i, s in enumerate(shapes)]
    rest = [ParamSpec(f"v{i}", (n,)) for i, n in enumerate(vectors)]
    costs = [MATRIX] * len(matrices) + [VECTOR] * len(rest)
    return Problem((*matrices, *rest), tuple(costs), dp, tp, PlanOptions(**options))


SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=20)


def test_registry_has_the_four_systems():
    assert set(registry()) >= {"sc", "asc", "canzona", "nv-layerwise"}


def test_unknown_strategy_gets_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'canzona'"):
        make_plan("canzone", (), (), 1, 1)


@given(
    shapes=SHAPES,
    vectors=st.lists(st.integers(1, 300), max_size=5),
    dp=st.integers(1, 8),
    tp=st.integers(1, 4),
    bucket=st.integers(1, 8000),
    alpha=st.floats(0, 1),
    fallback=st.booleans(),
    capacity=st.integers(1, 20_000),
    cost=st.sampled_from(["numel", "memory", "flops"]),
    mode=st.sampled_from(["no", "single", "slot", "global"]),
)
@settings(deadline=None, max_examples=80)
def test_every_strategy_gives_a_valid_plan(
    shapes, vectors, dp, tp, bucket, alpha, fallback, capacity, cost, mode
):  # make_plan validates
    for name, versions in [("sc", [None]), ("asc", [None]), ("canzona", [None]), ("nv-layerwise", nv_versions())]:
        for version in versions:
            p = problem(
                shapes,
                dp,
                tp,
                vectors,
                bucket_elements=bucket,
                alpha=alpha,
                fallback=fallback,
                capacity_bytes=capacity,
                cost=cost,
                tp_mode=mode,
                **({"nv_version": version} if version else {}),
            )
            plan = make_plan(name, p.parameters, p.costs, dp, tp, p.options)
            balance = report(plan, p.costs)
            assert balance["matrices"] == len(shapes)
            if name != "sc":
                owned = [s.owner for s in plan.family("matrix").slots]
                assert EVERY not in owned
                assert sum(balance["loads"]["flops"]) == pytest.approx(sum(map(MATRIX.flops, shapes)))
                assert balance["flops_ratio"] >= balance["lower_bound"]["dp"] - 1e-9
            sizes = [4 * q.local_numel(tp) for q in p.parameters[: len(shapes)]]
            big = {q.name for q, size in zip(p.parameters, sizes, strict=False) if size > capacity}
            assert set(balance["over_capacity"]) == big
            for group in (g for rank in plan.micro_groups for g in rank):
                assert group.over_capacity == (len(group.parameters) == 1 and sizes[group.parameters[0]] > capacity)


def nv_versions():
    return ["ping-pong", "lpt-numel", "lpt-ns"]


@pytest.mark.parametrize("name", ["sc", "asc", "canzona", "nv-layerwise"])
def test_one_matrix_and_many_ranks(name):
    p = problem([(5, 7)], dp=6, tp=4)
    balance = report(make_plan(name, p.parameters, p.costs, 6, 4), p.costs)
    assert sum(f > 0 for f in balance["loads"]["flops"]) == (6 if name == "sc" else 1)
    assert balance["idle_ranks"] == (0 if name == "sc" else 5)


def test_two_matrix_optimizers_are_refused():
    p = problem([(4, 4), (4, 4)], dp=2)
    with pytest.raises(ConfigError, match="other, toy"):
        make_plan("asc", p.parameters, [MATRIX, Toy("other")], 2, 1)


# --- start-index and alpha cuts -------------------------------------------------------------------------------------


def literal_start_index_owner(bucket, dp):
    share = (bucket.end - bucket.start) / dp
    return [next(r for r in range(dp) if r * share <= s.start - bucket.start < (r + 1) * share) for s in bucket.slots]


def literal_alpha_cuts(buckets, R, alpha):
    """The pseudo-code of the specification, line by line, with a linear scan for the nearest border."""
    T = [b.slots[-1].end - b.start for b in buckets]
    G = sum(T) / R
    load = [0] * R
    cuts = [None] * len(buckets)
    for i in sorted(range(len(buckets)), key=lambda i: T[i], reverse=True):
        B = sorted({0} | {s.end - buckets[i].start for s in buckets[i].slots} | {T[i]})
        even = T[i] / R
        gap = [max(0.0, G - load[r]) for r in range(R)]
        D = sum(gap)
        fill = [even if D <= 1e-9 else gap[r] / D * T[i] for r in range(R)]
        want = [(1 - alpha) * even + alpha * fill[r] for r in range(R)]
        cut = [0] * (R + 1)
        cut[R] = T[i]
        acc = 0.0
        for r in range(R - 1):
            acc += want[r]
            best = None
            for border in B:
                if border >= cut[r] and (best is None or abs(border - acc) < abs(best - acc)):
                    best = border
            cut[r + 1] = best
            load[r] += cut[r + 1] - cut[r]
        load[R - 1] += T[i] - cut[R - 1]
        cuts[i] = tuple(buckets[i].start + c for c in cut)
    return tuple(cuts)


CASES = {"shapes": SHAPES, "dp": st.integers(1, 8), "bucket": st.integers(1, 8000)}


@given(**CASES)
@settings(deadline=None)
def test_start_index_rule(shapes, dp, bucket):
    p = problem(shapes, dp)
    for b in lay_out(p.parameters, range(len(shapes)), 1, bucket, dp):
        cuts = start_index_cuts(b, dp)
        assert [s.owner for s in own_whole(b, cuts).slots] == literal_start_index_owner(b, dp)
        assert cuts[-1] == b.slots[-1].end
        assert set(cuts) <= {b.start, *(s.end for s in b.slots)}


@given(**CASES, alpha=st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1)))
@settings(deadline=None, max_examples=200)
def test_alpha_rule_equals_its_literal_twin(shapes, dp, bucket, alpha):
    p = problem(shapes, dp)
    buckets = lay_out(p.parameters, range(len(shapes)), 1, bucket, dp)
    assert alpha_cuts(buckets, dp, alpha) == literal_alpha_cuts(buckets, dp, alpha)


def test_lower_border_wins_a_tie():
    p = problem([(64, 1), (64, 2)], dp=2)  # buffer 0..128 and 128..192: the even cut 96 is 32 from 128 and 96 from 0
    (bucket,) = lay_out(p.parameters, range(2), 1, 10_000, 2)
    assert alpha_cuts([bucket], 2, 0.0) == ((0, 128, 192),)
    p = problem([(64, 1), (64, 1), (64, 1)], dp=2)  # the even cut 96 is half-way between 64 and 128
    (bucket,) = lay_out(p.parameters, range(3), 1, 10_000, 2)
    assert alpha_cuts([bucket], 2, 0.0) == ((0, 64, 192),)


def test_fallback_keeps_the_start_index_plan():
    def both(shapes, **options):
        p = problem(shapes, 3, bucket_elements=150, **options)
        return [make_plan(n, p.parameters, p.costs, 3, 1, p.options) for n in ("canzona", "asc")]

    found = set()
    for k in range(1, 12):
        shapes = [(8, 8)] * k + [(16, 8)]
        canzona, asc = both(shapes)
        free, _ = both(shapes, fallback=False)
        found.add(canzona.fallback_used)
        assert not free.fallback_used
        cuts = lambda plan: [b.cuts for b in plan.family("matrix").buckets]  # noqa: E731
        assert cuts(canzona) == (cuts(asc) if canzona.fallback_used else cuts(free))
        worst = [max(report(q, [MATRIX] * (k + 1))["loads"]["elements"]) for q in (canzona, asc, free)]
        assert worst[0] == min(worst)
    assert found == {True, False}


# --- NVIDIA's layer-wise optimizer ----------------------------------------------------------------------------------


def test_ping_pong_example():
    p = problem([], 4, vectors=range(1, 11))
    owners = nv.ping_pong(p)
    assert [[i for i in owners if owners[i] == r] for r in range(4)] == [[0, 7, 8], [1, 6, 9], [2, 5], [3, 4]]


@given(shapes=SHAPES, vectors=st.lists(st.integers(1, 300), max_size=8), dp=st.integers(2, 8))
@settings(deadline=None, max_examples=40)
def test_ping_pong_equals_megatrons_shard_params(shapes, vectors, dp):
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("megatron.core.optimizer.layer_wise_optimizer")
    p = problem(shapes, dp, vectors=vectors)
    tensors = [torch.nn.Parameter(torch.empty(q.shape, device="meta")) for q in p.parameters]
    lists = [[tensors[i] for i in p.members(atomic=a)] for a in (True, False)]
    group = SimpleNamespace(size=lambda: dp, rank=lambda: 0)
    theirs = module.LayerWiseDistributedOptimizer.__new__(module.LayerWiseDistributedOptimizer)
    theirs.pg_collection = SimpleNamespace(dp_cp=group, expt_dp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))
    with (  # without an initialised process group both would answer 1 and 0
        mock.patch.object(module, "get_pg_size", lambda g: g.size()),
        mock.patch.object(module, "get_pg_rank", lambda g: g.rank()),
    ):
        theirs.shard_params([SimpleNamespace(param_groups=[{"params": ps}]) for ps in lists if ps])
    index = {t: i for i, t in enumerate(tensors)}
    expected = {index[t]: rank for rank, mine in enumerate(theirs.dp_cp_params_list) for t in mine}
    assert nv.ping_pong(p) == expected


def packed_end(sizes, bucket, dp, version):
    p = problem([], dp)
    matrices = [ParamSpec(f"w{i}", (n, 1)) for i, n in enumerate(sizes)]
    plan = make_plan(
        "nv-layerwise",
        matrices,
        [MATRIX] * len(sizes),
        dp,
        1,
        PlanOptions(nv_version=version, bucket_elements=bucket or p.options.bucket_size(dp)),
    )
    return [b.end for b in plan.family("matrix").buckets], plan


def test_a_full_bucket_absorbs_what_fits_into_its_padding():
    """Cases of Megatron-LM's test_layer_wise_param_layout.py (main, August 2026); ``min(shape)`` is 1: cost = numel."""
    assert packed_end([256] * 6, 5 * 256, 4, "lpt-ns")[0] == [2048]
    assert packed_end([256] * 8, 5 * 256, 4, "lpt-ns")[0] == [2048]
    assert packed_end([192, 128, 128, 256, 192, 192], 448, 2, "lpt-ns")[0] == [1024, 1408]
    assert packed_end([256] * 6, 5 * 256, 4, "lpt-numel")[0] == [2048, 3072]


def test_padding_of_the_128_expert_case():
    """Pull request 5415: 128 equal matrices over 32 shards, bucket of 100: 160 slots before, 128 after."""
    n = 2688 * 1856
    assert packed_end([n] * 128, 100 * n, 32, "lpt-numel")[0] == [128 * n, 160 * n]
    assert packed_end([n] * 128, 100 * n, 32, "lpt-ns")[0] == [128 * n]


RECORDED = [(64, 128), (256, 64), (192, 64), (64, 96)] * 2
"""Matrices of a two-layer Qwen3 of width 64, four heads of 32 (two for keys and values), MLP 96."""


def test_ping_pong_loads_as_recorded_from_megatron():
    """The same model with tied embedding (128 x 64) and norms at DP=4: elements per rank under 0.16.1."""
    p = problem(RECORDED, 4, vectors=[128 * 64, *[64, 32, 32, 64] * 2, 64])
    loads = [0] * 4
    for index, owner in nv.ping_pong(p).items():
        loads[owner] += p.parameters[index].numel
    assert loads == [28_832, 34_912, 14_432, 16_480]


@pytest.mark.parametrize(("version", "buckets", "end"), [("lpt-numel", 3, 98_304), ("lpt-ns", 2, 90_112)])
def test_packings_as_recorded_from_megatron(version, buckets, end):
    """Two Qwen3 layers at DP=2 as 0.19.2 and main (August 2026) laid them out; 86016 real elements."""
    p = problem(RECORDED, 2)
    options = PlanOptions(nv_version=version, bucket_elements=20_000)
    family = make_plan("nv-layerwise", p.parameters, p.costs, 2, 1, options).family("matrix")
    assert sum(s.end - s.start for s in family.slots) == 86_016
    assert (len(family.buckets), family.numel) == (buckets, end)


def literal_lpt_ns(shapes, bucket_elements, dp):
    """Megatron's packing by Newton-Schulz cost as its authors describe it: owners by parameter and bucket sizes."""

    def up(value, divisor):
        while value % divisor:
            value += 1
        return value

    numel = [m * n for m, n in shapes]
    cost = [max(s) * min(s) * min(s) for s in shapes]
    divisor = math.lcm(64, math.lcm(dp, 128) // dp)
    compute, owner, sizes = [0] * dp, {}, []

    def emit(chunk):
        cursor = [0] * dp
        for i in sorted(chunk, key=lambda i: -cost[i]):
            fits = [r for r in range(dp) if up(cursor[r], 64) + numel[i] <= sum(numel[j] for j in chunk) / dp * 1.3]
            r = min(fits, key=lambda r: compute[r]) if fits else min(range(dp), key=lambda r: cursor[r])
            cursor[r] = up(cursor[r], 64) + numel[i]
            compute[r] += cost[i]
            owner[i] = r
        sizes.append(dp * up(max(cursor), divisor))

    chunk, estimate = [], [0] * dp
    for i in reversed(range(len(shapes))):
        if chunk:
            full = sum(numel[j] for j in chunk) >= max(bucket_elements, int(dp * max(numel[j] for j in chunk) * 0.9))
            if full and up(min(estimate), 64) + numel[i] > up(max(estimate), divisor):
                emit(chunk)
                chunk, estimate = [], [0] * dp
        r = min(range(dp), key=lambda r: estimate[r])
        estimate[r] = up(estimate[r], 64) + numel[i]
        chunk.append(i)
    emit(chunk)
    return owner, sizes


@given(**CASES)
@settings(deadline=None, max_examples=150)
def test_packing_by_cost_equals_its_literal_twin(shapes, dp, bucket):
    p = problem(shapes, dp)
    options = PlanOptions(nv_version="lpt-ns", bucket_elements=bucket)
    family = make_plan("nv-layerwise", p.parameters, p.costs, dp, 1, options).family("matrix")
    owners, sizes = literal_lpt_ns(shapes, bucket, dp)
    assert {s.parameter: s.owner for s in family.slots} == owners
    assert [b.end - b.start for b in family.buckets] == sizes


def test_packing_by_size_resets_and_by_cost_carries():
    shapes = [(8, 8), *[(64, 1)] * 3] * 4  # one costly matrix a bucket, all of 64 elements
    p = problem(shapes, 4, bucket_elements=256)
    carried, reset = (
        make_plan("nv-layerwise", p.parameters, p.costs, 4, 1, PlanOptions(nv_version=v, bucket_elements=256))
        for v in ("lpt-ns", "lpt-numel")
    )
    costly = lambda plan: [s.owner for s in plan.family("matrix").slots if s.parameter % 4 == 0]  # noqa: E731
    assert sorted(costly(carried)) == [0, 1, 2, 3]
    assert len(set(costly(reset))) == 1


def test_a_matrix_above_the_slack_goes_to_the_emptiest_shard():
    ends, plan = packed_end([64, 64, 1024], None, 2, "lpt-ns")
    owner = {s.parameter: s.owner for s in plan.family("matrix").slots}
    assert ends == [2048]
    assert owner[0] == owner[1] != owner[2]


@given(**CASES)
@settings(deadline=None)
def test_shards_are_never_smaller_than_what_they_hold(shapes, dp, bucket):
    p = problem(shapes, dp)
    for version in ("lpt-numel", "lpt-ns"):
        plan = make_plan(
            "nv-layerwise", p.parameters, p.costs, dp, 1, PlanOptions(nv_version=version, bucket_elements=bucket)
        )
        for b in plan.family("matrix").buckets:
            share = (b.end - b.start) // dp
            assert (b.end - b.start) % (dp * 64) == 0
            assert all((s.start - b.start) // share == s.owner and s.start % 64 == 0 for s in b.slots)
