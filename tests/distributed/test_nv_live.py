"""Megatron's own layer-wise optimizer against our plan, our engine and one process."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from baselines.nv_layerwise_live import LiveLayerWise
from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.mesh import Mesh
from impl.canzona.plan import Plan
from impl.canzona.strategies import PlanOptions, make_plan
from impl.errors import ConfigError
from impl.models.sharding import shard
from impl.optimizers.base import create
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import Reference
from tests.distributed.toy import Toy, is_matrix, random_tensors, specs_mixed

try:
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
except ImportError as error:
    pytest.skip(f"megatron-core's layer-wise optimizer cannot be imported: {error}", allow_module_level=True)

pytestmark = pytest.mark.distributed
LR, STEPS = 0.02, 6
SPECS = specs_mixed()


def rules():
    return {"muon": create("muon"), "adamw": create("adamw")}


def plan_for(dp: int, tp: int, version: str = "ping-pong", bucket: int = 150) -> Plan:
    optimizers = rules()
    costs = [optimizers["muon" if is_matrix(s) else "adamw"] for s in SPECS]
    options = PlanOptions(nv_version=version, bucket_elements=bucket)
    return make_plan("nv-layerwise", SPECS, costs, dp, tp, options)


def train(kind, rank, dp, tp, options, dtype=torch.float32, silent=False):
    """Parameters after each step, norms, owners and counts of one rank."""
    plan, mesh = plan_for(dp, tp), Mesh.create(dp, tp, torch.device("cpu"))
    model = Toy(random_tensors(SPECS, 1), SPECS, tp, mesh.tp_rank, dtype)
    engine = kind(model, plan, rules(), mesh, options)
    if silent:
        engine.layer_wise.allgather_params = lambda: None
    history, norms = [], []
    for step in range(STEPS):
        engine.begin_step()
        gradients = random_tensors(SPECS, 2, step, mesh.dp_rank, scale=3.0)
        with engine.microbatch(last=False):
            model.loss(gradients).mul(0.25).backward()
        with engine.microbatch(last=True):
            model.loss(gradients).mul(0.75).backward()
        norms.append(engine.step(LR).grad_norm)
        engine.synchronize()
        history.append(model.local())
    return {
        "history": history,
        "norms": norms,
        "bytes": engine.ledger.bytes(),
        "state_bytes": engine.state_bytes(),
        "phases": set(engine.clock.seconds()),
        "state": {k: v.clone() for k, v in engine.state_dict().items()},
        "owners": engine.owners() if kind is LiveLayerWise else None,
    }


def both(rank, world, dp, tp, options, dtype):
    return train(LiveLayerWise, rank, dp, tp, options, dtype), train(Engine, rank, dp, tp, options, dtype)


def one_process(dp, tp, options):
    optimizers = rules()
    by_name = {s.name: optimizers["muon" if is_matrix(s) else "adamw"] for s in SPECS}
    reference = Reference(random_tensors(SPECS, 1), SPECS, by_name, options, tp)
    for step in range(STEPS):
        per_rank = [random_tensors(SPECS, 2, step, rank, scale=3.0) for rank in range(dp)]
        # what ``train`` accumulates over its two microbatches
        reference.step([{n: g * 0.25 + g * 0.75 for n, g in gradients.items()} for gradients in per_rank], LR)
    return reference.parameters


def owners_of(plan: Plan) -> dict[str, int | None]:
    return {plan.parameters[s.parameter].name: s.owner for f in plan.families for s in f.slots}


def check_equal(results, dp, tp, options, dtype):
    """Live and engine to the last bit at every step, and both the one-process run for fp32 parameters."""
    planned = owners_of(plan_for(dp, tp))
    assert len(set(planned.values())) == dp
    expected = one_process(dp, tp, options)
    for rank, (live, ours) in enumerate(results):
        assert live["owners"] == planned
        assert live["norms"] == ours["norms"]
        assert live["state_bytes"] == ours["state_bytes"]
        for step in range(STEPS):
            for name, value in ours["history"][step].items():
                assert torch.equal(live["history"][step][name], value), (rank, step, name)
        for name, value in ours["state"].items():
            assert torch.equal(live["state"][name], value), (rank, name)
        if dtype == torch.float32:
            for spec in SPECS:
                whole = shard(expected[spec.name], spec, tp, rank % tp)
                assert torch.equal(live["history"][-1][spec.name], whole), (rank, spec.name)
        assert live["bytes"]["grad_reduce"] == ours["bytes"]["grad_reduce"]
        assert live["bytes"].get("param_sync") == ours["bytes"].get("param_sync")
        assert live["phases"] - {"tp_exchange"} == ours["phases"] - {"tp_exchange"}


TWO = EngineOptions(reduction="native", clip=1.0, weight_decay=0.1)


def on_two_ranks(rank, world):
    """Everything that is checked at DP=2, in one start of the ranks: Megatron's import takes most of the time."""
    mesh = Mesh.create(2, 1, torch.device("cpu"))
    return {
        "float32": both(rank, world, 2, 1, TWO, torch.float32),
        "bfloat16": both(rank, world, 2, 1, TWO, torch.bfloat16),
        "without gather": train(LiveLayerWise, rank, 2, 1, TWO, silent=True)["history"][-1],
        "resumed": resumed(mesh),
        "owned": megatron_at_work(mesh),
        "swapped": swapped_owners(mesh),
    }


def resumed(mesh):
    """Parameters of a run of four steps, and of one that continued from its third in fresh objects."""

    def fresh(seed):
        model = Toy(random_tensors(SPECS, seed), SPECS, 1, 0, torch.bfloat16)
        return model, LiveLayerWise(model, plan_for(2, 1), rules(), mesh, TWO)

    def advance(model, live, step):
        live.begin_step()
        with live.microbatch(last=True):
            model.loss(random_tensors(SPECS, 2, step, mesh.dp_rank)).backward()
        live.step(LR)

    first, second = fresh(1), fresh(9)
    for step in range(3):
        advance(*first, step)
    second[1].load_state_dict({k: v.clone() for k, v in first[1].state_dict().items()})
    for run in (first, second):
        advance(*run, 3)
    return first[0].local(), second[0].local()


def megatron_at_work(mesh):
    """Elements and bytes of masters that a rank steps, after the proof that the code is Megatron's."""
    live = LiveLayerWise(Toy(random_tensors(SPECS, 1), SPECS, 1, 0), plan_for(2, 1), rules(), mesh)
    kind, theirs = type(live.layer_wise), LayerWiseDistributedOptimizer
    assert issubclass(kind, theirs)
    for name in ("shard_params", "broadcast_params", "prepare_grads", "param_groups"):
        assert getattr(kind, name) is getattr(theirs, name), f"{name} is not Megatron's"
    owned = sum(p.numel() for group in live.layer_wise.param_groups for p in group["params"])
    return owned, live.state_bytes()["master"]


def swapped_owners(mesh):
    """The message about a plan in which the two ranks change places."""
    plan = plan_for(2, 1)

    def swap(bucket):
        slots = tuple(dataclasses.replace(s, owner=1 - (s.owner or 0)) for s in bucket.slots)
        return dataclasses.replace(bucket, slots=slots)

    families = tuple(dataclasses.replace(f, buckets=tuple(map(swap, f.buckets))) for f in plan.families)
    wrong = dataclasses.replace(plan, families=families, micro_groups=plan.micro_groups[::-1])
    try:
        LiveLayerWise(Toy(random_tensors(SPECS, 1), SPECS, 1, 0), wrong, rules(), mesh)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(on_two_ranks, 2, timeout=120)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bitwise_equal_at_dp_2(two_ranks, dtype):
    check_equal([r[dtype] for r in two_ranks], 2, 1, TWO, getattr(torch, dtype))


def test_negative_control_without_megatrons_gather_the_ranks_drift_apart(two_ranks):
    first, second = (r["without gather"] for r in two_ranks)
    assert any(not torch.equal(a, second[name]) for name, a in first.items())


def test_ownership_and_stepping_are_megatrons(two_ranks):
    assert sum(r["owned"][0] for r in two_ranks) == sum(s.numel for s in SPECS)
    assert all(master == 4 * elements for elements, master in (r["owned"] for r in two_ranks))


def test_resumes_to_the_last_bit(two_ranks):
    for result in two_ranks:
        through, resumed_later = result["resumed"]
        assert all(torch.equal(resumed_later[name], value) for name, value in through.items())


def test_other_owners_are_noticed(two_ranks):
    assert all("Megatron gives" in r["swapped"] for r in two_ranks)


@pytest.mark.parametrize(
    ("dp", "tp", "reduction"),
    [
        (1, 2, "native"),
        pytest.param(3, 1, "rank-order", marks=pytest.mark.slow),
        pytest.param(2, 2, "native", marks=pytest.mark.slow),
    ],
)
def test_bitwise_equal_on_other_meshes(dp, tp, reduction):
    options = EngineOptions(reduction=reduction, clip=1.0, weight_decay=0.1)
    results = run_ranks(both, dp * tp, dp, tp, options, torch.float32, timeout=120)
    check_equal(results, dp, tp, options, torch.float32)


@pytest.mark.parametrize("version", ["lpt-numel", "lpt-ns"])
def test_other_versions_are_refused(version):
    model = Toy(random_tensors(SPECS, 1), SPECS, 1, 0)
    with pytest.raises(ConfigError, match=f"ping-pong, not nv-layerwise with {version}"):
        LiveLayerWise(model, plan_for(2, 1, version), rules(), None)  # type: ignore[arg-type]


def test_a_missing_megatron_is_a_clear_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "baselines.megatron.layer_wise", None)
    model = Toy(random_tensors(SPECS, 1), SPECS, 1, 0)
    with pytest.raises(ConfigError, match=r"install megatron-core==0\.16\.1"):
        LiveLayerWise(model, plan_for(2, 1), rules(), None)  # type: ignore[arg-type]


def test_planning_does_not_import_megatron():
    """The live baseline lies beside the planners, which must stay light."""
    code = "import sys; from impl.canzona.strategies import registry; registry(); assert 'megatron' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
