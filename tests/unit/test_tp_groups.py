"""Micro-groups: the fast ``global`` packing against its pseudo-code, and the rules of every mode."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.canzona.plan import EVERY
from impl.canzona.strategies import PlanOptions, Problem
from impl.canzona.tp_groups import MODES, Item, balanced, consecutive, micro_groups
from impl.models.parameters import ParamSpec


def lpt(items, tp):
    """Longest processing time, solved from scratch: (item, host) pairs in order."""
    loads, out = [0.0] * tp, []
    for item in sorted(items, key=lambda i: -i.weight):
        host = min(range(tp), key=lambda h: (loads[h], h))
        loads[host] += item.weight
        out.append((item, host))
    return out


def literal_global(items, tp, capacity):
    """The pseudo-code of the specification with the capacity in bytes; LPT is solved anew at every trial."""

    def overflows(trial):
        sizes = [0] * tp
        for item, host in lpt(trial, tp):
            sizes[host] += item.size
        return sum(sizes) / tp > capacity or max(sizes) > capacity

    groups, cur, lone = [], [], 0
    order = sorted(items, key=lambda i: (i.weight, i.parameter), reverse=True)
    at = 0
    while at < len(order):
        item = order[at]
        if not overflows([*cur, item]):
            cur.append(item)
            at += 1
        elif cur:
            groups.append(lpt(cur, tp))
            cur = []
        else:  # a lone item may exceed the capacity; hosts take turns over such items
            groups.append([(item, lone % tp)])
            lone += 1
            at += 1
    if cur:
        groups.append(lpt(cur, tp))
    return [(tuple(i.parameter for i, _ in g), tuple(h for _, h in g)) for g in groups]


ITEMS = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=24).map(
    lambda pairs: [Item(p, float(w), s) for p, (w, s) in enumerate(pairs)]
)


@given(ITEMS, st.integers(1, 8), st.integers(1, 40))
@settings(deadline=None, max_examples=400)
def test_global_equals_its_literal_twin(items, tp, capacity):
    found = [(g.parameters, g.hosts) for g in balanced(items, tp, capacity)]
    assert found == literal_global(items, tp, capacity)


@given(ITEMS, st.integers(1, 8), st.integers(1, 40), st.sampled_from(sorted(MODES)))
@settings(deadline=None, max_examples=300)
def test_every_mode_hosts_each_matrix_once_within_capacity(items, tp, capacity, mode):
    groups = MODES[mode](items, tp, capacity)
    assert sorted(p for g in groups for p in g.parameters) == list(range(len(items)))
    sizes = {i.parameter: i.size for i in items}
    for group in groups:
        assert all(0 <= h < tp for h in group.hosts)
        on_host = [
            sum(sizes[p] for p, h in zip(group.parameters, group.hosts, strict=True) if h == r) for r in range(tp)
        ]
        if group.over_capacity:
            assert len(group.parameters) == 1
            assert sizes[group.parameters[0]] > capacity
        elif mode == "slot":  # overshoots by less than its last item
            assert max(on_host) < capacity + max(sizes[p] for p in group.parameters)
        else:
            assert max(on_host) <= capacity


def items(*weights, size=1):
    return [Item(p, float(w), size) for p, w in enumerate(weights)]


def test_no_takes_chunks_in_order():
    groups = MODES["no"](items(1, 5, 3, 9, 2), 2, 100)
    assert [(g.parameters, g.hosts) for g in groups] == [((0, 1), (0, 1)), ((2, 3), (0, 1)), ((4,), (0,))]


def test_single_takes_the_heaviest_first():
    groups = MODES["single"](items(1, 5, 3, 9, 2), 2, 100)
    assert [(g.parameters, g.hosts) for g in groups] == [((3, 1), (0, 1)), ((2, 4), (0, 1)), ((0,), (0,))]


def test_slot_closes_once_a_host_is_full():
    groups = MODES["slot"](items(4, 4, 4, 4, 4, 4, size=4), 2, 5)
    assert [(g.parameters, g.hosts) for g in groups] == [((0, 1, 2), (0, 1, 0)), ((3, 4, 5), (0, 1, 0))]


def test_global_rolls_back_instead():
    groups = MODES["global"](items(4, 4, 4, 4, 4, 4, size=4), 2, 5)
    assert [g.parameters for g in groups] == [(5, 4), (3, 2), (1, 0)]


def test_global_packs_by_weight():
    (group,) = MODES["global"](items(7, 5, 4, 3, 2), 2, 100)
    assert dict(zip(group.parameters, group.hosts, strict=True)) == {0: 0, 1: 1, 2: 1, 3: 0, 4: 1}


def test_lone_matrix_above_capacity_is_marked():
    for mode in MODES.values():
        small, big = Item(0, 1.0, 4), Item(1, 9.0, 40)
        groups = mode([small, big], 2, 10)
        assert {(g.parameters, g.over_capacity) for g in groups} == {((0,), False), ((1,), True)}


def test_consecutive_groups():
    sizes = [3, 3, 3, 20, 1, 9, 1]
    groups = consecutive([Item(p, 1.0, s) for p, s in enumerate(sizes)], 10, EVERY)
    assert [g.parameters for g in groups] == [(0, 1, 2), (3,), (4, 5), (6,)]
    assert [g.over_capacity for g in groups] == [False, True, False, False]
    assert all(set(g.hosts) == {EVERY} for g in groups)


class Count:
    name, atomic = "count", True

    def flops(self, shape):
        return 1.0

    published_flops = flops

    def state_bytes(self, shape):
        return 0


def test_capacity_is_bytes_of_the_fp32_shard_and_uncut_matrices_run_everywhere():
    cut = [ParamSpec(f"w{i}", (8, 4), tp_dim=0) for i in range(4)]  # a shard of 4 x 4 fp32 is 64 bytes
    specs = (*cut, ParamSpec("router", (3, 5)))

    def groups(capacity, tp=2, mode="global"):
        problem = Problem(specs, (Count(),) * 5, 1, tp, PlanOptions(capacity_bytes=capacity))
        return micro_groups(problem, [range(5)], mode)[0]

    assert [len(g.parameters) for g in groups(128)] == [4, 1]
    assert [len(g.parameters) for g in groups(127)] == [2, 2, 1]
    assert all(g.over_capacity for g in groups(59))
    assert groups(128)[-1].hosts == (EVERY,)
    assert [len(g.parameters) for g in groups(128, tp=1)] == [1, 1, 1, 1, 1]  # whole: 128 bytes each
    assert {h for g in groups(128, tp=1) for h in g.hosts} == {0}
    assert [len(g.parameters) for g in groups(128, mode="every")] == [2, 2, 1]


def test_unknown_cost_or_mode_is_refused():
    with pytest.raises(ValueError, match="tp_mode"):
        PlanOptions(tp_mode="best")  # type: ignore[arg-type]
