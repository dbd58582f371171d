"""The engine on what real training brings: fused matrices that are split, gradients that are not finite, offloading."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.mesh import Mesh
from impl.canzona.states import StateStore
from impl.canzona.strategies import PlanOptions, make_plan
from impl.models.parameters import Fragment, ParamSpec
from impl.models.sharding import shard
from impl.optimizers.base import create
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import Reference
from tests.distributed.toy import Toy, is_matrix, random_tensors, specs_mixed

pytestmark = pytest.mark.distributed
SYSTEMS = ["sc", "asc", "canzona", "nv-layerwise"]
LR = 0.05
QKV = tuple(
    Fragment(name, tuple((group * 7 + low, group * 7 + high) for group in range(2)))
    for name, low, high in (("q", 0, 3), ("k", 3, 5), ("v", 5, 7))
)


def specs() -> list[ParamSpec]:
    """The mixed toy with the layout of its fused matrices: two groups of [3 q | 2 k | 2 v] rows, gate over up."""

    def described(spec: ParamSpec) -> ParamSpec:
        if "qkv" in spec.name:
            return dataclasses.replace(spec, fragments=QKV)
        if "fc1" in spec.name:
            half = spec.shape[0] // 2
            return dataclasses.replace(
                spec, fragments=(Fragment("gate", ((0, half),)), Fragment("up", ((half, 2 * half),)))
            )
        return spec

    return [described(spec) for spec in specs_mixed()]


def rules(optimizer: str) -> dict[str, Any]:
    return {optimizer: create(optimizer, {"period": 2} if optimizer != "muon" else {}), "adamw": create("adamw")}


def build(mesh: Mesh, strategy: str, split: str, optimizer: str, **options: Any) -> tuple[Toy, Engine]:
    described = specs()
    optimizers = rules(optimizer)
    costs = [optimizers[optimizer if is_matrix(s) else "adamw"] for s in described]
    plan = make_plan(
        strategy, described, costs, mesh.dp, mesh.tp,
        PlanOptions(split=split, bucket_elements=100, capacity_bytes=280, fallback=False),  # type: ignore[arg-type]
    )  # fmt: skip
    model = Toy(random_tensors(described, 1), described, mesh.tp, mesh.tp_rank)
    return model, Engine(model, plan, optimizers, mesh, EngineOptions(reduction="rank-order", **options))


def advance(model: Toy, engine: Engine, step: int, poison: dict[str, float] | None = None, **how: Any) -> Any:
    gradients = random_tensors(specs(), 7, engine.mesh.dp_rank, step)
    for name, value in (poison or {}).items():
        gradients[name].view(-1)[-1] = value
    engine.begin_step()
    with engine.microbatch(last=True):
        model.loss(gradients).backward()
    return engine.step(LR, **how)


def run_split(rank: int, world: int, dp: int, tp: int, cases: list[tuple[str, str, str]]) -> list[Any]:
    mesh = Mesh.create(dp, tp, torch.device("cpu"))
    out = []
    for strategy, split, optimizer in cases:
        model, engine = build(mesh, strategy, split, optimizer)
        norms = [advance(model, engine, step).grad_norm for step in range(4)]
        engine.synchronize()
        out.append((model.local(), norms, sorted(engine.states), mesh.tp_rank))
    return out


def reference(optimizer: str, dp: int, tp: int) -> tuple[dict[str, Tensor], list[float]]:
    described, optimizers = specs(), rules(optimizer)
    by_name = {s.name: optimizers[optimizer if is_matrix(s) else "adamw"] for s in described}
    twin = Reference(random_tensors(described, 1), described, by_name, EngineOptions(), tp)
    norms = [twin.step([random_tensors(described, 7, r, step) for r in range(dp)], LR) for step in range(4)]
    return twin.parameters, norms


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)])
def test_split_matrices_equal_the_reference_bitwise(dp: int, tp: int) -> None:
    cases = [(s, how, o) for s in SYSTEMS for how in ("update", "atoms") for o in ("muon", "soap")]
    results = run_ranks(run_split, dp * tp, dp, tp, cases, timeout=200)
    for optimizer in ("muon", "soap"):
        expected, norms = reference(optimizer, dp, tp)
        for result in results:
            for case, (local, found, states, tp_rank) in zip(cases, result, strict=True):
                if case[2] != optimizer:
                    continue
                assert found == norms, case
                for spec in specs():
                    assert torch.equal(local[spec.name], shard(expected[spec.name], spec, tp, tp_rank)), (case, spec)
                assert not {"a_qkv.weight", "a_fc1.weight"} & set(states)


def test_every_fragment_has_one_state_among_the_ranks() -> None:
    results = run_ranks(run_split, 4, 2, 2, [("canzona", "atoms", "muon"), ("canzona", "update", "muon")])
    expected = {f"{s.name}/{f.name}" for s in specs() for f in s.fragments}
    for number in range(2):
        held = [name for result in results for name in result[number][2] if "/" in name]
        assert sorted(held) == sorted(expected)


def broken_join(rank: int, world: int, dp: int, tp: int, cases: list[tuple[str, str, str]]) -> list[Any]:
    import impl.canzona.updater as module

    def wrong(whole: Tensor, spec: ParamSpec) -> list[Tensor]:
        if not spec.fragments:
            return [whole]
        sizes = [f.count for f in spec.fragments]
        return [part.contiguous() for part in whole.split(sizes)]  # as if Q, K and V were stacked

    module.split = wrong  # type: ignore[attr-defined]
    return run_split(rank, world, dp, tp, cases)


def test_negative_control_rows_guessed_instead_of_described() -> None:
    expected, _ = reference("muon", 1, 1)
    ((local, *_),) = run_ranks(broken_join, 1, 1, 1, [("sc", "update", "muon")])[0]
    assert not torch.equal(local["a_qkv.weight"], expected["a_qkv.weight"])
    assert torch.equal(local["a_proj.weight"], expected["a_proj.weight"])


def snapshot(model: Toy, engine: Engine) -> dict[str, Tensor]:
    engine.synchronize()
    return {k: v.clone() for k, v in {**engine.state_dict(), **model.local()}.items()}


def run_skips(rank: int, world: int, dp: int, tp: int) -> list[Any]:
    mesh = Mesh.create(dp, tp, torch.device("cpu"))
    out = []
    for strategy in SYSTEMS:
        for optimizer in ("muon", "soap", "basis-rotation"):
            model, engine = build(mesh, strategy, "atoms", optimizer)
            clean_model, clean = build(mesh, strategy, "atoms", optimizer)
            advance(model, engine, 0)
            advance(clean_model, clean, 0)
            before = snapshot(model, engine)
            poisons = [{"a_fc1.weight": math.nan}, {"head.weight": math.inf, "b_odd.weight": -math.inf}]
            infos = [advance(model, engine, 9, poison if mesh.dp_rank == 0 else None) for poison in poisons]
            after = snapshot(model, engine)
            untouched = [k for k in before if not torch.equal(before[k], after[k])] == ["skips"]
            in_a_row = engine.skips, int(after["skips"])
            advance(model, engine, 1)
            advance(clean_model, clean, 1)
            goes_on = all(
                torch.equal(a, b)
                for a, b in zip(snapshot(model, engine).values(), snapshot(clean_model, clean).values(), strict=True)
            )
            counts = (*in_a_row, engine.skips, engine.steps)
            out.append((strategy, optimizer, [i.not_finite for i in infos], untouched, goes_on, counts))
    return out


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)])
def test_a_step_that_is_not_finite_is_skipped_and_names_its_parameters(dp: int, tp: int) -> None:
    for result in run_ranks(run_skips, dp * tp, dp, tp, timeout=200):
        for strategy, optimizer, names, untouched, goes_on, counts in result:
            up = "a_fc1.weight/up" if strategy in ("asc", "canzona") else "a_fc1.weight"
            assert names == [(up,), ("b_odd.weight", "head.weight")], (strategy, optimizer)
            assert untouched, (strategy, optimizer)
            assert goes_on, (strategy, optimizer)
            assert counts == (2, 2, 0, 2)


def run_offloaded(rank: int, world: int, dp: int, tp: int) -> list[Any]:
    mesh = Mesh.create(dp, tp, torch.device("cpu"))
    out = []
    for strategy in ("sc", "canzona"):
        for optimizer in ("muon", "soap", "basis-rotation"):
            runs = []
            for offload in (False, True):
                model, engine = build(mesh, strategy, "atoms", optimizer, offload=offload)
                for step in range(4):
                    advance(model, engine, step, measure=step == 2)
                runs.append((snapshot(model, engine), engine.counters(), engine.worst_health()))
            (plain, counts, _), (moved, counts_moved, _) = runs
            out.append((plain.keys() == moved.keys() and all(torch.equal(plain[k], moved[k]) for k in plain),
                        counts == counts_moved))  # fmt: skip
    return out


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)])
def test_offloaded_state_gives_the_same_bits(dp: int, tp: int) -> None:
    for result in run_ranks(run_offloaded, dp * tp, dp, tp, timeout=200):
        assert all(same and counted for same, counted in result)


def test_an_offloaded_state_is_changed_only_by_giving_it_back() -> None:
    store = StateStore(torch.device("cpu"), offload=True)
    fresh = {"momentum": torch.zeros(3)}
    store.add("a", fresh)
    store.add("b", {"momentum": torch.zeros(2)})
    visit = store.visit([["a"], ["b"]])
    (taken,) = visit.take()
    taken["momentum"] += 1
    assert store["a"]["momentum"].tolist() == [0, 0, 0]
    visit.give_back([taken])
    assert store["a"]["momentum"].tolist() == [1, 1, 1]
    (other,) = visit.take()
    other["momentum"] += 2
    visit.give_back([other])
    assert store["b"]["momentum"].tolist() == [2, 2]
    assert fresh["momentum"].tolist() == [0, 0, 0]
    assert store.bytes() == 20


def run_health(rank: int, world: int, dp: int, tp: int) -> list[Any]:
    mesh = Mesh.create(dp, tp, torch.device("cpu"))
    out = []
    for strategy in SYSTEMS:
        model, engine = build(mesh, strategy, "none", "basis-rotation")
        advance(model, engine, 0)
        unasked = engine.worst_health()
        advance(model, engine, 1, measure=True)
        worst = engine.worst_health()
        for state in engine.states.values():
            if "failures" in state:
                state["failures"] += 2
        counted = engine.counters()
        for state in engine.states.values():
            for key, tensor in state.items():
                if key.startswith("basis"):
                    tensor *= 1.1
        advance(model, engine, 2, measure=True)
        alarms = engine.alarms(engine.worst_health())
        out.append((unasked, worst, counted, alarms))
    return out


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)])
def test_health_and_counters_are_of_all_matrices_once(dp: int, tp: int) -> None:
    matrices = sum(len(s.matrices) for s in specs() if is_matrix(s))
    results = run_ranks(run_health, dp * tp, dp, tp, timeout=100)
    for unasked, worst, counted, alarms in [r for result in results for r in result]:
        assert unasked == {}
        assert 0 < worst["basis-rotation.orthogonality"] < 1e-4
        assert counted["basis-rotation.failures"] == 2 * matrices
        assert alarms
        assert "basis-rotation.orthogonality is" in alarms[0]
    assert all(result == results[0] for result in results)
