"""The plan as data, and what the validator refuses."""

import dataclasses
import json
import subprocess
import sys

import pytest

from impl.canzona.plan import EVERY, MicroGroup, Plan, PlanError, validate
from impl.canzona.strategies import PlanOptions, make_plan
from impl.models import catalogue
from impl.optimizers.base import create
from impl.optimizers.routing import route

SYSTEMS = [("sc", {}), ("asc", {}), ("canzona", {})]
SYSTEMS += [("nv-layerwise", {"nv_version": v}) for v in ("ping-pong", "lpt-numel", "lpt-ns")]
ids = [f"{name}-{o.get('nv_version', '')}".strip("-") for name, o in SYSTEMS]


def plan_of(strategy="canzona", dp=2, tp=2, optimizer="muon", model="qwen3-tiny", **options):
    parameters = catalogue.load(model).parameters(tp)
    costs = [create(r.optimizer) for r in route(parameters, optimizer)]
    return make_plan(strategy, parameters, costs, dp, tp, PlanOptions(**{"bucket_elements": 20_000, **options}))


@pytest.mark.parametrize(("strategy", "options"), SYSTEMS, ids=ids)
@pytest.mark.parametrize("tp", [1, 2])
def test_json_round_trip_and_determinism(strategy, options, tp):
    plan = plan_of(strategy, 3, tp, **options)
    again = plan_of(strategy, 3, tp, **options)
    assert plan == again
    assert plan.digest == again.digest
    copy = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert copy == plan
    assert copy.digest == plan.digest
    validate(copy)


@pytest.mark.parametrize(("strategy", "options"), SYSTEMS, ids=ids)
def test_only_one_family_without_matrices(strategy, options):
    plan = plan_of(strategy, optimizer="adamw", **options)
    assert [f.name for f in plan.families] == ["elementwise"]
    assert plan.micro_groups == ((), ())


@pytest.mark.parametrize(("strategy", "options"), SYSTEMS, ids=ids)
def test_reductions_and_synchronization(strategy, options):
    plan = plan_of(strategy, **options)
    kinds = {f.name: (f.reduction, f.synchronization) for f in plan.families}
    if strategy == "sc":
        assert set(kinds.values()) == {("all-reduce", "none")}
        assert all(s.owner == EVERY for f in plan.families for s in f.slots)
    elif options.get("nv_version") == "ping-pong":
        assert set(kinds.values()) == {("all-reduce", "once")}
    else:
        assert set(kinds.values()) == {("reduce-scatter", "per-bucket")}
        assert all(s.owner is None for s in plan.family("elementwise").slots)
    sizes = sum(s.end - s.start for f in plan.families for s in f.slots)
    assert sizes == sum(p.local_numel(2) for p in plan.parameters)
    if kinds["matrix"][0] == "all-reduce":  # no padding
        assert sizes == sum(f.numel for f in plan.families)


def test_packed_plans_have_equal_shards():
    for version in ("lpt-numel", "lpt-ns"):
        for bucket in plan_of("nv-layerwise", 3, 2, nv_version=version).family("matrix").buckets:
            assert len({b - a for a, b in zip(bucket.cuts, bucket.cuts[1:], strict=False)}) == 1
            assert bucket.cuts[-1] == bucket.end


def change(plan, family=None, bucket=None, slot=None, **new):
    """The plan with fields of one family, bucket or slot changed."""
    families = list(plan.families)
    f = families[family]
    if bucket is None:
        families[family] = dataclasses.replace(f, **new)
    else:
        buckets = list(f.buckets)
        b = buckets[bucket]
        if slot is None:
            buckets[bucket] = dataclasses.replace(b, **new)
        else:
            slots = list(b.slots)
            slots[slot] = dataclasses.replace(slots[slot], **new)
            buckets[bucket] = dataclasses.replace(b, slots=tuple(slots))
        families[family] = dataclasses.replace(f, buckets=tuple(buckets))
    return dataclasses.replace(plan, families=tuple(families))


def groups(plan, rank, new):
    return dataclasses.replace(plan, micro_groups=(*plan.micro_groups[:rank], new, *plan.micro_groups[rank + 1 :]))


def test_validator_refuses_a_cut_matrix():
    plan = plan_of()
    bucket = plan.families[0].buckets[0]
    middle = (bucket.slots[0].start + bucket.slots[0].end) // 2
    with pytest.raises(PlanError, match="cut"):
        validate(change(plan, 0, 0, cuts=(bucket.start, middle, bucket.cuts[-1])))


def test_validator_refuses_two_owners():
    plan = plan_of()
    bucket = plan.families[0].buckets[0]
    doubled = change(plan, 0, 0, slots=(*bucket.slots, bucket.slots[-1]))
    with pytest.raises(PlanError, match="two slots"):
        validate(doubled)


def test_validator_refuses_no_owner_and_a_wrong_owner():
    plan = plan_of()
    slot = plan.families[0].buckets[0].slots[0]
    with pytest.raises(PlanError, match="no owner"):
        validate(change(plan, 0, 0, 0, owner=None))
    with pytest.raises(PlanError, match="cut"):
        validate(change(plan, 0, 0, 0, owner=1 - slot.owner))
    with pytest.raises(PlanError, match="scattered"):
        validate(change(plan, 0, 0, 0, owner=EVERY))


def test_validator_refuses_a_missing_parameter():
    plan = plan_of()
    bucket = plan.families[1].buckets[0]
    with pytest.raises(PlanError, match="no family"):
        validate(change(plan, 1, 0, slots=bucket.slots[1:]))


def test_validator_refuses_gaps_between_buckets_and_segments():
    plan = plan_of()
    bucket = plan.families[0].buckets[0]
    with pytest.raises(PlanError, match="tile"):
        validate(change(plan, 0, 0, end=bucket.end + 128))
    with pytest.raises(PlanError, match="cover"):
        validate(change(plan, 0, 0, cuts=(*bucket.cuts[:-1], bucket.cuts[-2])))
    with pytest.raises(PlanError, match=r"dp \+ 1"):
        validate(change(plan, 0, 0, cuts=bucket.cuts[1:]))


def test_validator_refuses_a_double_host():
    plan = plan_of()
    first, *rest = plan.micro_groups[0]
    with pytest.raises(PlanError, match="two micro-groups"):
        validate(groups(plan, 0, (first, first, *rest)))
    twice = MicroGroup((*first.parameters, first.parameters[0]), (*first.hosts, 0))
    with pytest.raises(PlanError, match="two micro-groups"):
        validate(groups(plan, 0, (twice, *rest)))


def test_validator_refuses_a_matrix_without_or_with_a_wrong_host():
    plan = plan_of()
    first, *rest = plan.micro_groups[0]
    with pytest.raises(PlanError, match="differ"):
        validate(groups(plan, 0, tuple(rest)))
    with pytest.raises(PlanError, match="no host"):
        validate(groups(plan, 0, (MicroGroup(first.parameters, (2, *first.hosts[1:])), *rest)))
    with pytest.raises(PlanError, match="one host"):
        validate(groups(plan, 0, (MicroGroup(first.parameters, first.hosts[1:]), *rest)))


def test_planners_need_no_torch():
    modules = [
        "plan",
        "strategies",
        "layout",
        "partition",
        "costs",
        "families",
        "tp_groups",
        "canzona",
        "balance",
        "drawing",
    ]
    names = [f"impl.canzona.{m}" for m in modules] + [f"baselines.{m}" for m in ("sc", "asc", "nv_layerwise")]
    code = f"import sys, {', '.join(names)}; print(sorted({{'torch', 'matplotlib'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
