"""The matrices inside fused ones: rows, the same as transformers' own tensors, and what a plan makes of them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from impl.canzona.balance import report
from impl.canzona.plan import Plan
from impl.canzona.strategies import PlanOptions, make_plan
from impl.errors import ConfigError
from impl.harness.planning import plan_workload, workload
from impl.harness.setup import prepare
from impl.harness.spec import RunSpec, parse
from impl.models import catalogue, hf_layout, logical
from impl.models.sharding import join, split
from impl.optimizers.base import create
from impl.optimizers.routing import is_matrix

MODELS = ["qwen3-tiny", "qwen3-32b", "llama-7b"]
FUSED = ("linear_qkv.weight", "linear_fc1.weight")


def fused(model, heads=False):
    config = catalogue.load(model, layers=1)
    return config, [logical.split(p, config, heads=heads) for p in config.parameters(1) if p.name.endswith(FUSED)]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("heads", [False, True])
def test_fragments_are_all_rows_once(model, heads):
    config, specs = fused(model, heads)
    assert [p.name for p in specs if not p.fragments] == []
    for spec in specs:
        rows = [r for f in spec.fragments for start, stop in f.rows for r in range(start, stop)]
        assert sorted(rows) == list(range(spec.shape[0]))
    names = [f.name for f in specs[0].fragments]
    a = config.arch
    if heads:
        assert len(names) == a.num_attention_heads + 2 * a.num_key_value_heads
        assert all(f.count == a.head_dim for f in specs[0].fragments)
    else:
        assert names == ["q", "k", "v"]


def test_the_matrices_are_those_of_transformers():
    config, specs = fused("qwen3-tiny")
    for spec in specs:
        whole = torch.arange(spec.numel, dtype=torch.float32).view(spec.shape)
        expected = hf_layout.to_hf(config, spec, whole)
        found = split(whole, spec)
        for ours, theirs in zip(found, expected.values(), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.is_contiguous()
        assert torch.equal(join(found, spec), whole)


def test_heads_are_rows_of_their_query_key_or_value():
    _config, (by_matrix, _) = fused("qwen3-tiny")
    _, (by_head, _) = fused("qwen3-tiny", heads=True)
    whole = torch.randn(by_matrix.shape)
    q, k, v = split(whole, by_matrix)
    heads = dict(zip((f.name for f in by_head.fragments), split(whole, by_head), strict=True))
    for name, matrix in (("q", q), ("k", k), ("v", v)):
        mine = [head for key, head in heads.items() if key.startswith(f"{name}.")]
        assert torch.equal(torch.cat(mine), matrix)


def test_only_gate_and_up_become_blocks():
    _, (qkv, fc1) = fused("qwen3-tiny")
    assert qkv.in_blocks() == (qkv,)
    gate, up = fc1.in_blocks()
    assert (gate.name, up.name) == (f"{fc1.name}/gate", f"{fc1.name}/up")
    assert gate.module == up.module == fc1.name
    assert gate.shape == up.shape == (fc1.shape[0] // 2, fc1.shape[1])
    assert (gate.first, up.first) == (0, fc1.shape[0] // 2)
    plain = dataclasses.replace(fc1, fragments=())
    assert plain.in_blocks() == (plain,)


@pytest.mark.parametrize("strategy", ["canzona", "asc", "sc", "nv-layerwise"])
@pytest.mark.parametrize(("dp", "tp"), [(3, 1), (2, 2)])
def test_plans_with_atoms_are_valid_and_survive_json(strategy, dp, tp):
    config = catalogue.load("qwen3-tiny")
    parameters = [logical.split(p, config) if is_matrix(p) else p for p in config.parameters(tp)]
    costs = [create("soap" if is_matrix(p) else "adamw") for p in parameters]
    options = PlanOptions(split="atoms", bucket_elements=20_000)
    plan = make_plan(strategy, parameters, costs, dp, tp, options)
    split_up = [p for p in plan.parameters if p.part_of]
    assert bool(split_up) == (strategy in ("canzona", "asc"))
    assert Plan.from_json(plan.to_json()) == plan
    for family in plan.families:
        slots = list(family.slots)
        for one, two in itertools.pairwise(slots):
            a, b = plan.parameters[one.parameter], plan.parameters[two.parameter]
            if a.part_of and a.part_of == b.part_of:
                assert (one.end, a.first) == (two.start, 0)  # the module's parameter is one range, gate first


def test_costs_are_those_of_the_matrices_inside():
    config = catalogue.load("qwen3-tiny")
    soap = create("soap")
    loads = {}
    for how in ("none", "update", "atoms"):
        options = PlanOptions(split=how)
        load = workload(config, "soap", 1, options=options)
        planned = plan_workload(load, "canzona", 1, options)
        loads[how] = planned.report["loads"]
    expected = 0.0
    for p in config.parameters(1):
        if is_matrix(p):
            shapes = logical.split(p, config).matrices
            expected += sum(map(soap.flops, shapes))
            assert sum(m * n for m, n in shapes) == p.numel
    assert loads["update"]["flops"] == loads["atoms"]["flops"] == [pytest.approx(expected)]
    assert loads["none"]["flops"][0] > loads["update"]["flops"][0]
    assert loads["none"]["elements"] == loads["atoms"]["elements"]


def test_atoms_even_out_the_hosts_of_large_models():
    config = catalogue.load("qwen3-32b")
    ratios = {}
    for how in ("update", "atoms"):
        options = PlanOptions(split=how)
        planned = plan_workload(workload(config, "muon", 8, options=options), "canzona", 32, options)
        ratios[how] = planned.report["per_gpu_flops_ratio"]
    assert ratios["atoms"] < 0.7 * ratios["update"]


def test_reports_of_block_plans_need_costs_by_entry():
    config = catalogue.load("qwen3-tiny")
    options = PlanOptions(split="atoms")
    planned = plan_workload(workload(config, "muon", 2, options=options), "canzona", 2, options)
    assert len(planned.costs) == len(planned.plan.parameters)
    assert report(planned.plan, planned.costs)["flops_ratio"] == planned.report["flops_ratio"]


def test_settings_that_came_later_keep_the_names_of_runs():
    plain = RunSpec(model="qwen3-tiny")
    assert plain.digest != parse(RunSpec, {"model": "qwen3-tiny", "plan": {"split": "atoms"}}).digest
    assert plain.digest != parse(RunSpec, {"model": "qwen3-tiny", "max_skips": 0}).digest
    with pytest.raises(ConfigError, match=r"plan.split: .*'none', 'update' or 'atoms'"):
        parse(RunSpec, {"model": "qwen3-tiny", "plan": {"split": "qkv"}})


def test_a_run_is_prepared_with_its_split():
    setup = prepare(parse(RunSpec, {"model": "qwen3-tiny", "dp": 2, "plan": {"split": "atoms"}}))
    assert any(p.name.endswith("linear_fc1.weight/up") for p in setup.plan.parameters)
    assert any([f.name for f in p.fragments] == ["q", "k", "v"] for p in setup.plan.parameters)
