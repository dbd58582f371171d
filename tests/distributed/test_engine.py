"""The engine against its one-process reference: bitwise, for every strategy, mesh and awkward case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.mesh import Mesh
from impl.canzona.plan import Plan
from impl.canzona.strategies import PlanOptions, make_plan
from impl.models.parameters import ParamSpec
from impl.models.sharding import shard
from impl.optimizers.base import Optimizer, create
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import Reference
from tests.distributed.toy import Toy, is_matrix, random_tensors, specs_mixed

pytestmark = pytest.mark.distributed
SYSTEMS = [("sc", "lpt-ns"), ("asc", "lpt-ns"), ("canzona", "lpt-ns"), ("nv-layerwise", "ping-pong"),
           ("nv-layerwise", "lpt-ns")]  # fmt: skip
BUCKETS = 100  # elements: several buckets per family
LR = 0.05


@dataclass(frozen=True)
class Case:
    """One run of the toy.  missing[r] are the parameters that get no gradient on DP rank r."""

    strategy: str
    nv_version: str = "lpt-ns"
    specs: tuple[ParamSpec, ...] = tuple(specs_mixed())
    steps: int = 20
    reduction: str = "rank-order"
    capacity_bytes: int = 2**20
    gradient_scale: float = 1.0
    frozen: tuple[str, ...] = ()
    missing: dict[int, tuple[str, ...]] = field(default_factory=dict)
    dtype: str = "float32"
    microbatches: int = 1
    bucket_elements: int = BUCKETS

    @property
    def trained(self) -> list[ParamSpec]:
        return [s for s in self.specs if s.name not in self.frozen]

    def optimizers(self) -> dict[str, Optimizer]:
        muon, adamw = create("muon"), create("adamw")
        return {s.name: muon if is_matrix(s) else adamw for s in self.trained}

    def plan(self, dp: int, tp: int) -> Plan:
        options = PlanOptions(bucket_elements=self.bucket_elements, capacity_bytes=self.capacity_bytes,
                              nv_version=self.nv_version, fallback=False)  # type: ignore[arg-type]  # fmt: skip
        costs = list(self.optimizers().values())
        return make_plan(self.strategy, self.trained, costs, dp, tp, options)

    def gradients(self, dp_rank: int, step: int) -> dict[str, Tensor]:
        out = random_tensors(self.specs, 7, dp_rank, step, scale=self.gradient_scale)
        for name in self.missing.get(dp_rank, ()):
            out[name].zero_()
        return out


def run_cases(rank: int, world: int, dp: int, tp: int, cases: list[Case]) -> list[dict[str, Any]]:
    mesh = Mesh.create(dp, tp, torch.device("cpu"))
    return [run_case(mesh, case) for case in cases]


def run_case(mesh: Mesh, case: Case) -> dict[str, Any]:
    whole = random_tensors(case.specs, 1)
    model = Toy(whole, case.specs, mesh.tp, mesh.tp_rank, dtype=getattr(torch, case.dtype))
    for name in case.frozen:
        model.get_parameter(name).requires_grad_(False)
    optimizers = {"muon": create("muon"), "adamw": create("adamw")}
    options = EngineOptions(reduction=case.reduction, clip=1.0, weight_decay=0.01)  # type: ignore[arg-type]
    engine = Engine(model, case.plan(mesh.dp, mesh.tp), optimizers, mesh, options)
    norms = []
    for step in range(case.steps):
        engine.begin_step()
        gradients = case.gradients(mesh.dp_rank, step)
        for micro in range(case.microbatches):
            loss = model.loss(gradients, case.missing.get(mesh.dp_rank, ())) / case.microbatches
            with engine.microbatch(last=micro == case.microbatches - 1):
                loss.backward()
        norms.append(engine.step(LR * (1 + step % 3)).grad_norm)
    engine.synchronize()
    momentum = {
        key.split("/")[1]: 4 * tensor.numel()
        for key, tensor in engine.state_dict().items()
        if key.endswith("/momentum")
    }
    return {"parameters": model.local(), "momentum_bytes": momentum, "norms": norms, "bytes": engine.ledger.bytes(),
            "state_bytes": engine.state_bytes(), "tp_rank": mesh.tp_rank, "dp_rank": mesh.dp_rank}  # fmt: skip


def reference(case: Case, dp: int, tp: int) -> tuple[dict[str, Tensor], list[float]]:
    options = EngineOptions(clip=1.0, weight_decay=0.01)
    whole = random_tensors(case.specs, 1)
    twin = Reference(whole, case.trained, case.optimizers(), options, tp)
    norms = [twin.step([case.gradients(r, step) for r in range(dp)], LR * (1 + step % 3)) for step in range(case.steps)]
    return {**whole, **{s.name: twin.parameters[s.name] for s in case.trained}}, norms


def check(case: Case, dp: int, tp: int, results: list[dict[str, Any]]) -> None:
    expected, norms = reference(case, dp, tp)
    for result in results:
        assert result["norms"] == norms, (case.strategy, case.nv_version)
        for spec in case.specs:
            want = shard(expected[spec.name], spec, tp, result["tp_rank"])
            got = result["parameters"][spec.name]
            assert torch.equal(got, want), (case.strategy, case.nv_version, spec.name, (got - want).abs().max())


def check_all(cases: list[Case], dp: int, tp: int) -> list[list[dict[str, Any]]]:
    results = run_ranks(run_cases, dp * tp, dp, tp, cases, timeout=200)
    for number, case in enumerate(cases):
        check(case, dp, tp, [r[number] for r in results])
    return results


def systems(**changes: Any) -> list[Case]:
    return [Case(strategy, version, **changes) for strategy, version in SYSTEMS]


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (4, 1)])
def test_equals_reference_bitwise(dp: int, tp: int) -> None:
    cases = systems()
    if dp <= 2:
        cases += systems(reduction="native", steps=5)
    if tp == 2:
        cases += systems(capacity_bytes=1, steps=5)  # every matrix a group of its own
        cases += systems(capacity_bytes=4 * 70, steps=5)  # a few groups
    check_all(cases, dp, tp)


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 1)])
def test_awkward_parameter_sets(dp: int, tp: int) -> None:
    one = (ParamSpec("only_fc1.weight", (8, 6), tp_dim=0, blocks=(4, 4)),)
    few = (ParamSpec("x.weight", (5, 3)), ParamSpec("norm.weight", (3,)))
    cases = [
        *systems(specs=one, steps=4),
        *systems(specs=few, steps=4),
        *systems(gradient_scale=0.0, steps=4),
        *systems(gradient_scale=1e-12, steps=4),
        *systems(frozen=("a_qkv.weight", "head.weight"), steps=4),
        *systems(missing={1: ("a_fc1.weight", "embedding.weight")}, steps=4),
        *systems(microbatches=4, gradient_scale=4.0, steps=1),
        *systems(bucket_elements=10**9, steps=4),
    ]
    check_all(cases, dp, tp)


def test_native_reports_its_deviation_at_four_ranks() -> None:
    """Two layouts differ in the last bits with the backend's own order of summation, and stay close."""
    cases = systems(reduction="native", steps=1)
    results = run_ranks(run_cases, 4, 4, 1, cases)
    expected, _ = reference(cases[0], 4, 1)
    for number in range(len(cases)):
        for spec in cases[0].specs:
            got = results[0][number]["parameters"][spec.name]
            torch.testing.assert_close(got, expected[spec.name], rtol=0, atol=3e-2)
    for number in range(len(cases)):  # whatever the deviation, ranks agree with each other
        for rank in range(1, 4):
            for name, value in results[rank][number]["parameters"].items():
                assert torch.equal(value, results[0][number]["parameters"][name])


def test_optimizer_step_sends_nothing_over_dp_and_state_is_only_at_owners() -> None:
    dp = tp = 2
    results = check_all(systems(steps=2), dp, tp)
    matrices = [s for s in specs_mixed() if is_matrix(s)]
    for number, (strategy, version) in enumerate(SYSTEMS):
        per_rank = [r[number] for r in results]
        for result in per_rank:
            for phase, by in result["bytes"].items():
                assert by["dp"] == 0 or phase in ("grad_reduce", "param_sync")
                assert by["tp"] == 0 or phase in ("grad_reduce", "tp_exchange")
                assert by["world"] == 0 or phase == "grad_norm"
            assert result["bytes"]["tp_exchange"]["tp"] > 0
            assert result["bytes"]["grad_reduce"]["dp"] > 0
            assert ("param_sync" in result["bytes"]) == (strategy != "sc")
        owners = dp if strategy == "sc" else 1
        hosts = tp if strategy in ("sc", "nv-layerwise") else 1
        for spec in matrices:  # a matrix that TP does not cut is updated on every TP rank
            copies = owners * (tp if spec.tp_dim is None else hosts)
            held = sum(r["momentum_bytes"].get(spec.name, 0) for r in per_rank)
            assert held == 4 * spec.numel * copies, (strategy, version, spec.name)


def test_bfloat16_parameters_keep_fp32_masters() -> None:
    results = run_ranks(run_cases, 2, 2, 1, systems(dtype="bfloat16", steps=3))
    first = results[0][0]["parameters"]
    for rank in results:
        for number in range(len(SYSTEMS)):
            for name, value in rank[number]["parameters"].items():
                assert value.dtype == torch.bfloat16
                assert torch.equal(value, first[name]), (SYSTEMS[number], name)


def break_scale(rank: int, world: int, case: Case) -> dict[str, Any]:
    from impl.canzona.reducer import GradientReducer

    original = GradientReducer._launch

    def launch(self: Any, buffer: Any, bucket: Any) -> None:
        if rank == 1:
            buffer.gradients[bucket.start : bucket.start + 1] += 1e-3
        original(self, buffer, bucket)

    GradientReducer._launch = launch  # type: ignore[method-assign]
    return run_case(Mesh.create(world, 1, torch.device("cpu")), case)


def test_negative_control_one_wrong_gradient_is_seen() -> None:
    case = Case("canzona", steps=2)
    with pytest.raises(AssertionError):
        check(case, 2, 1, run_ranks(break_scale, 2, case))


def different_models(rank: int, world: int) -> str:
    mesh = Mesh.create(world, 1, torch.device("cpu"))
    case = Case("canzona", frozen=("a_qkv.weight",) if rank == 1 else (), steps=1)
    try:
        run_case(mesh, case)
    except RuntimeError as error:
        return str(error)
    return "ran"


def test_a_parameter_frozen_on_one_rank_only_is_refused_not_a_hang() -> None:
    assert all("different plans" in message for message in run_ranks(different_models, 2))


def save_and_resume(rank: int, world: int, case: Case) -> bool:
    mesh = Mesh.create(2, world // 2, torch.device("cpu"))
    whole = random_tensors(case.specs, 1)

    def fresh() -> tuple[Toy, Engine]:
        model = Toy(whole, case.specs, mesh.tp, mesh.tp_rank)
        optimizers = {"muon": create("muon"), "adamw": create("adamw")}
        return model, Engine(model, case.plan(mesh.dp, mesh.tp), optimizers, mesh, EngineOptions())

    def train(model: Toy, engine: Engine, steps: range) -> None:
        for step in steps:
            loss = model.loss(case.gradients(mesh.dp_rank, step))
            with engine.microbatch(last=True):
                loss.backward()
            engine.step(LR)
        engine.synchronize()

    model, engine = fresh()
    train(model, engine, range(3))
    saved = {k: v.clone() for k, v in engine.state_dict().items()}
    train(model, engine, range(3, 6))
    again, resumed = fresh()
    resumed.load_state_dict(saved)
    train(again, resumed, range(3, 6))
    return all(torch.equal(a, b) for a, b in zip(model.local().values(), again.local().values(), strict=True))


@pytest.mark.parametrize("case", systems(), ids=lambda c: f"{c.strategy}-{c.nv_version}")
@pytest.mark.slow
def test_three_and_three_steps_equal_six(case: Case) -> None:
    assert all(run_ranks(save_and_resume, 4, case))
