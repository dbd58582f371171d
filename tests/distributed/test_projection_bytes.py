"""What a projection says of bytes and memory is what the engine counts for the same plan, to the byte."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from impl.canzona.engine import Engine
from impl.canzona.mesh import Mesh
from impl.canzona.strategies import PlanOptions
from impl.harness.planning import Planned, plan_workload, workload
from impl.models import catalogue, gpt, weights
from impl.projection import hardware, memory
from impl.projection.machine import Roofline
from impl.projection.timeline import Timeline
from impl.projection.training import Workload, project
from tests.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]
SYSTEMS = [("sc", "lpt-ns"), ("asc", "lpt-ns"), ("canzona", "lpt-ns"), ("nv-layerwise", "ping-pong"),
           ("nv-layerwise", "lpt-ns"), ("nv-layerwise", "lpt-numel")]  # fmt: skip
CONFIG = catalogue.load("qwen3-tiny", layers=2)
ROWS, SEQUENCE = 2, 16
MACHINE = Roofline(hardware.load("h100x8"))


def planned(system: tuple[str, str], dp: int, tp: int, optimizer: str = "muon", capacity: int = 30_000) -> Planned:
    strategy, version = system
    options = PlanOptions(bucket_elements=9_000, nv_version=version, capacity_bytes=capacity, fallback=False)  # type: ignore
    return plan_workload(workload(CONFIG, optimizer, tp, options=options), strategy, dp, options)


def projected(made: Planned, dtype: str) -> Any:
    plan = made.plan
    work = Workload(sequence=SEQUENCE, batch=ROWS * plan.dp, dtype=dtype, sequence_parallel=False)  # type: ignore
    return project(plan, made.costs, CONFIG, work, MACHINE)


def counted(rank: int, world: int, dp: int, tp: int, cases: list[tuple[tuple[str, str], str, str]]) -> list[Any]:
    """Run one step of each case and return what this rank's engine counted."""
    mesh = Mesh.create(dp, tp, torch.device("cpu"))
    out = []
    for system, optimizer, dtype in cases:
        made = planned(system, dp, tp, optimizer)
        model = gpt.build_model(CONFIG, mesh.tp_group, dtype=getattr(torch, dtype), device="cpu")
        weights.initialize(model, CONFIG, 0, mesh.tp_rank, mesh.tp)
        engine = Engine(model, made.plan, {cost.name: cost for cost in made.costs}, mesh)
        generator = torch.Generator().manual_seed(mesh.dp_rank)
        tokens = torch.randint(0, 256, (ROWS, SEQUENCE + 1), generator=generator)
        engine.begin_step()
        loss = gpt.loss(model, tokens)
        with engine.microbatch(last=True):
            loss.backward()
        engine.step(1e-3)
        engine.synchronize()
        out.append((mesh.dp_rank, mesh.tp_rank, engine.ledger.bytes(), engine.state_bytes()))
    return out


def bytes_of(timeline: Timeline, rank: tuple[int, int]) -> dict[tuple[str, str], float]:
    """Return one rank's bytes by phase and dimension, those of the model's own activations left out."""
    out: dict[tuple[str, str], float] = {}
    for op in timeline.ops:
        if op.dimension and op.phase not in ("forward", "backward"):
            key = op.phase, op.dimension
            out[key] = out.get(key, 0.0) + float(np.broadcast_to(op.bytes, timeline.mesh)[rank])
    return {key: count for key, count in out.items() if count}


def flat(ledger: dict[str, dict[str, int]]) -> dict[tuple[str, str], float]:
    return {(phase, dim): float(n) for phase, by in ledger.items() for dim, n in by.items() if n}


def check(cases: list[tuple[tuple[str, str], str, str]], dp: int, tp: int, results: list[list[Any]]) -> None:
    for number, (system, optimizer, dtype) in enumerate(cases):
        made = planned(system, dp, tp, optimizer)
        found = projected(made, dtype)
        masters, state = memory.owned_bytes(made.plan, made.costs)
        largest: dict[str, dict[str, float]] = {}
        for result in results:
            dp_rank, tp_rank, ledger, held = result[number]
            assert bytes_of(found.timeline, (dp_rank, tp_rank)) == flat(ledger), (system, dtype, dp_rank, tp_rank)
            assert (masters[dp_rank, tp_rank], state[dp_rank, tp_rank]) == (held["master"], held["state"]), system
            for (phase, dim), count in flat(ledger).items():
                by = largest.setdefault(phase, {})
                by[dim] = max(by.get(dim, 0.0), count)
        busiest = {p: {d: n for d, n in by.items() if n} for p, by in found.timeline.bytes().items()}
        assert {p: by for p, by in busiest.items() if p in largest} == largest, system


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (3, 1), (2, 2)])
def test_the_timeline_moves_what_the_engine_counts(dp: int, tp: int) -> None:
    cases = [(system, "muon", "float32") for system in SYSTEMS]
    cases += [(system, "muon", "bfloat16") for system in SYSTEMS]
    cases += [(system, optimizer, "float32") for system in SYSTEMS[:3] for optimizer in ("soap", "shampoo", "adamw")]
    results = run_ranks(counted, dp * tp, dp, tp, cases, timeout=200)
    check(cases, dp, tp, results)
    phases = {key for result in results for _, _, ledger, _ in result for key in flat(ledger)}
    assert phases >= ({("grad_reduce", "dp"), ("param_sync", "dp")} if dp > 1 else set())
    assert phases >= ({("tp_exchange", "tp"), ("grad_reduce", "tp")} if tp > 1 else set())
    assert ("grad_norm", "world") in phases


def test_negative_control_another_plan_is_seen() -> None:
    """The comparison fails for a plan that moves one cut, one that hosts otherwise, and one byte too many."""
    case = (("canzona", "lpt-ns"), "muon", "float32")
    results = run_ranks(counted, 4, 2, 2, [case])
    check([case], 2, 2, results)
    with pytest.raises(AssertionError):
        check([(("asc", "lpt-ns"), "muon", "float32")], 2, 2, results)
    dp_rank, tp_rank, ledger, held = results[3][0]
    wrong = {phase: {dim: n + (phase == "param_sync") for dim, n in by.items()} for phase, by in ledger.items()}
    with pytest.raises(AssertionError):
        check([case], 2, 2, [*results[:3], [(dp_rank, tp_rank, wrong, held)]])
    with pytest.raises(AssertionError):
        check([case], 2, 2, [*results[:3], [(dp_rank, tp_rank, ledger, {**held, "state": held["state"] + 4})]])


def test_padded_collectives_move_more_and_the_engine_does_not_use_them() -> None:
    made = planned(("canzona", "lpt-ns"), 3, 1)
    work = Workload(sequence=SEQUENCE, batch=6, sequence_parallel=False)
    rooted, padded = (project(made.plan, made.costs, CONFIG, work, MACHINE, uneven=u) for u in ("rooted", "padded"))  # type: ignore
    for phase in ("grad_reduce", "param_sync"):
        assert padded.timeline.bytes()[phase]["dp"] > rooted.timeline.bytes()[phase]["dp"]
    expected = 0
    for family in made.plan.families:
        for bucket in family.buckets:
            lengths = [b - a for a, b in zip(bucket.cuts, bucket.cuts[1:], strict=False)]
            expected += 2 * max(lengths) * 4
    assert padded.timeline.bytes()["grad_reduce"]["dp"] == expected
    even = dataclasses.replace(made.plan, families=made.plan.families[1:], micro_groups=((),) * 3)
    sent = [project(even, made.costs, CONFIG, work, MACHINE, uneven=u).timeline.bytes() for u in ("rooted", "padded")]  # type: ignore
    assert sent[0] == sent[1], "equal segments need no padding"
