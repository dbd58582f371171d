"""Real transformers under every system: the same parameters to the last bit, also as in one process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.mesh import Mesh
from impl.canzona.strategies import PlanOptions, make_plan
from impl.models import catalogue, gpt, weights
from impl.optimizers.base import Optimizer, create
from impl.optimizers.muon import Muon
from impl.optimizers.routing import route
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import Reference

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SYSTEMS = [("sc", "lpt-ns"), ("asc", "lpt-ns"), ("canzona", "lpt-ns"), ("nv-layerwise", "ping-pong"),
           ("nv-layerwise", "lpt-ns")]  # fmt: skip
OPTIONS = {"clip": 1.0, "weight_decay": 0.01}
STEPS = 20
SEQUENCE = 16
CPU = torch.device("cpu")


def config(name: str = "qwen3-tiny") -> catalogue.ModelConfig:
    return catalogue.load(name, layers=2)


def optimizers_of(model: catalogue.ModelConfig, tp: int) -> dict[str, Optimizer]:
    made = {"muon": create("muon"), "adamw": create("adamw")}
    return {r.name: made[str(r.optimizer)] for r in route(model.parameters(tp), "muon")}


def batch(dp_rank: int, step: int, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    return torch.randint(0, 256, (rows, SEQUENCE + 1), generator=generator)


def make(mesh: Mesh, name: str, strategy: str, version: str, reduction: str) -> tuple[gpt.PortableGPT, Engine]:
    model_config = config(name)
    model = gpt.build_model(model_config, mesh.tp_group, dtype=torch.float32, device="cpu")
    weights.initialize(model, model_config, 0, mesh.tp_rank, mesh.tp)
    by_name = optimizers_of(model_config, mesh.tp)
    options = PlanOptions(bucket_elements=9_000, nv_version=version, capacity_bytes=30_000)  # type: ignore[arg-type]
    plan = make_plan(strategy, model_config.parameters(mesh.tp), list(by_name.values()), mesh.dp, mesh.tp, options)
    rules = {o.name: o for o in by_name.values()}
    return model, Engine(model, plan, rules, mesh, EngineOptions(reduction=reduction, **OPTIONS))  # type: ignore


def train(model: gpt.PortableGPT, engine: Engine, steps: int, micro: int = 1, rows: int = 2) -> None:
    for step in range(steps):
        engine.begin_step()
        parts = batch(engine.mesh.dp_rank, step, rows).chunk(micro)
        for number, part in enumerate(parts):
            loss = gpt.loss(model, part) / len(parts)
            with engine.microbatch(last=number == len(parts) - 1):
                loss.backward()
        engine.step(2e-3)
    engine.synchronize()


def digests(rank: int, world: int, name: str, dp: int, tp: int, reduction: str) -> list[str]:
    mesh = Mesh.create(dp, tp, CPU)
    out = []
    for strategy, version in SYSTEMS:
        model, engine = make(mesh, name, strategy, version, reduction)
        train(model, engine, STEPS)
        whole = weights.whole_parameters(model, config(name), mesh.tp_group)
        out.append(weights.params_digest(config(name), whole))
    return out


def one_process(rank: int, world: int, name: str, dp: int) -> str:
    """The reference: one model, the gradients of each DP rank's batch in turn, whole-tensor updates."""
    mesh = Mesh.create(1, 1, CPU)
    model_config = config(name)
    model = gpt.build_model(model_config, mesh.tp_group, dtype=torch.float32, device="cpu")
    weights.initialize(model, model_config, 0, 0, 1)
    own = dict(model.named_parameters())
    initial = {n: p.detach() for n, p in own.items()}
    options = EngineOptions(**OPTIONS)  # type: ignore[arg-type]
    twin = Reference(initial, model_config.parameters(1), optimizers_of(model_config, 1), options, tp=1)
    for step in range(STEPS):
        gradients = []
        for dp_rank in range(dp):
            model.zero_grad()
            gpt.loss(model, batch(dp_rank, step)).backward()
            gradients.append({n: p.grad.clone() if p.grad is not None else torch.zeros_like(p) for n, p in own.items()})
        twin.step(gradients, 2e-3)
        with torch.no_grad():
            for n, p in own.items():
                p.copy_(twin.parameters[n])
    return weights.params_digest(model_config, weights.whole_parameters(model, model_config, mesh.tp_group))


@pytest.mark.parametrize(
    ("name", "dp", "tp", "reduction"),
    [("qwen3-tiny", 2, 1, "native"), ("llama-tiny", 2, 1, "native"), ("qwen3-tiny", 3, 1, "rank-order"),
     ("qwen3-tiny", 4, 1, "rank-order")],
)  # fmt: skip
def test_every_system_equals_one_process(name: str, dp: int, tp: int, reduction: str) -> None:
    expected = run_ranks(one_process, 1, name, dp)[0]
    for rank in run_ranks(digests, dp * tp, name, dp, tp, reduction, timeout=120):
        assert rank == [expected] * len(SYSTEMS)


@pytest.mark.parametrize(("dp", "tp", "reduction"), [(1, 2, "native"), (2, 2, "native"), (3, 2, "rank-order")])
def test_every_system_agrees_under_tensor_parallelism(dp: int, tp: int, reduction: str) -> None:
    for rank in run_ranks(digests, dp * tp, "qwen3-tiny", dp, tp, reduction, timeout=200):
        assert len(set(rank)) == 1, dict(zip(SYSTEMS, rank, strict=True))


def accumulated(rank: int, world: int, micro: int) -> dict[str, Any]:
    mesh = Mesh.create(world, 1, CPU)
    calls = 0
    original = Muon.update_many

    def counting(self: Muon, grads: Sequence[Tensor], *args: Any) -> list[Tensor]:
        nonlocal calls
        calls += len(grads)
        return original(self, grads, *args)

    Muon.update_many = counting  # type: ignore[method-assign]
    model, engine = make(mesh, "qwen3-tiny", "canzona", "lpt-ns", "native")
    gradients: dict[str, Tensor] = {}
    update = engine._update

    def keep(lr: float, scale: float) -> None:
        for buffer in engine._buffers:
            for piece in buffer.family.pieces(mesh.dp_rank):
                name = engine.plan.parameters[piece.parameter].name
                gradients[f"{name}:{piece.start}"] = buffer.gradient(piece.start, piece.end).clone()
        update(lr, scale)

    engine._update = keep  # type: ignore[method-assign]
    train(model, engine, 1, micro=micro, rows=8)
    everyone: list[int] = [0] * world
    dist.all_gather_object(everyone, calls)
    return {"gradients": gradients, "calls": sum(everyone), "bytes": json.dumps(engine.ledger.bytes())}


def test_accumulation_gives_the_same_gradients_and_one_newton_schulz_per_matrix() -> None:
    """1 x 8 and 4 x 2 sequences: gradients within 1e-5, the same collectives, one update per matrix and step."""
    whole, parts = run_ranks(accumulated, 2, 1), run_ranks(accumulated, 2, 4)
    matrices = sum(1 for o in optimizers_of(config(), 1).values() if o.name == "muon")
    for a, b in zip(whole, parts, strict=True):
        assert a["calls"] == b["calls"] == matrices
        assert a["bytes"] == b["bytes"]
        for name, gradient in a["gradients"].items():
            relative = (gradient - b["gradients"][name]).norm() / gradient.norm().clamp_min(1e-12)
            assert relative < 1e-5, name
