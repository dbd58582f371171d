"""Basis rotation and SOAP in the engine: bitwise as in one process, whoever owns a matrix, also after a resume."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.mesh import Mesh
from impl.canzona.strategies import PlanOptions, make_plan
from impl.models.sharding import shard
from impl.optimizers.base import Optimizer, create
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import Reference
from tests.distributed.toy import Toy, is_matrix, random_tensors, specs_mixed

pytestmark = pytest.mark.distributed
SPECS = specs_mixed()
OPTIONS = EngineOptions(reduction="rank-order", clip=1.0, weight_decay=0.01)
SETTINGS = {
    "basis-rotation": {"period": 3, "stagger": True, "nesterov": True, "max_side": 10, "beyond": "blocks"},
    "soap": {"period": 2},
}
STEPS, LR = 7, 0.05


def optimizers(name: str) -> dict[str, Optimizer]:
    return {name: create(name, SETTINGS[name]), "nadam": create("nadam")}


def routed(name: str) -> dict[str, Optimizer]:
    matrix, other = optimizers(name).values()
    return {spec.name: matrix if is_matrix(spec) else other for spec in SPECS}


def gradients(dp_rank: int, step: int) -> dict[str, Tensor]:
    return random_tensors(SPECS, 7, dp_rank, step)


def train(rank: int, world: int, dp: int, tp: int) -> dict[str, Mapping[str, Tensor]]:
    """Return this rank's parameters after all steps by optimizer, after a resume in the middle of the run."""
    mesh = Mesh.create(dp, tp, torch.device("cpu"))
    out = {}
    for name in SETTINGS:
        saved: dict[str, Tensor] = {}
        for steps in (range(4), range(4, STEPS)):
            model = Toy(random_tensors(SPECS, 1), SPECS, mesh.tp, mesh.tp_rank)
            plan = make_plan("canzona", SPECS, list(routed(name).values()), dp, tp, PlanOptions(bucket_elements=100))
            engine = Engine(model, plan, optimizers(name), mesh, OPTIONS)
            if saved:
                engine.load_state_dict(saved)
            for step in steps:
                with engine.microbatch(last=True):
                    model.loss(gradients(mesh.dp_rank, step)).backward()
                engine.step(LR)
            engine.synchronize()
            saved = {key: tensor.clone() for key, tensor in engine.state_dict().items()}
        out[name] = model.local()
    return out


def expected(name: str, dp: int, tp: int, *, placed: bool = True) -> dict[str, Tensor]:
    twin = Reference(random_tensors(SPECS, 1), SPECS, routed(name), OPTIONS, tp)
    for index, spec in enumerate(SPECS):
        if placed:
            twin.optimizers[spec.name].place(twin.states[spec.name][0], index)
    for step in range(STEPS):
        twin.step([gradients(rank, step) for rank in range(dp)], LR)
    return twin.parameters


@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 2)])
def test_equals_reference_bitwise_after_a_resume(dp: int, tp: int) -> None:
    results = run_ranks(train, dp * tp, dp, tp, timeout=120)
    for name in SETTINGS:
        whole = expected(name, dp, tp)
        for rank, result in enumerate(results):
            for spec in SPECS:
                assert torch.equal(result[name][spec.name], shard(whole[spec.name], spec, tp, rank % tp)), spec.name


def test_turns_matter() -> None:
    """Negative control of the above: with all matrices refreshed at once the parameters are others."""
    turns, at_once = (expected("basis-rotation", 1, 1, placed=placed) for placed in (True, False))
    differ = [name for name in turns if not torch.equal(turns[name], at_once[name])]
    assert differ
    assert all(len(turns[name].shape) == 2 for name in differ)
