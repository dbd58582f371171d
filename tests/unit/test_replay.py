"""Rank replay does what the engine's own ranks do: the same states and masters, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from impl.__main__ import main
from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.exchange import Exchange
from impl.canzona.mesh import Mesh
from impl.canzona.plan import EVERY, Plan
from impl.canzona.strategies import PlanOptions, make_plan
from impl.harness import replay_check
from impl.harness.replay_run import ReplaySpec, summary
from impl.optimizers.base import create
from impl.projection import replay
from impl.projection.replay import Loopback, Place, Share
from tests.distributed.ranks import run_ranks
from tests.distributed.toy import Toy, is_matrix, random_tensors, specs_mixed

CPU = torch.device("cpu")
RULES = {"muon": {}, "soap": {"period": 2}, "basis-rotation": {"period": 2}}
STEPS, RATE = 3, 1e-2


def rules(name: str) -> dict[str, Any]:
    return {name: create(name, RULES[name]), "adamw": create("adamw")}


def plan_of(strategy: str, name: str, dp: int, tp: int = 1, size: int = 150) -> Plan:
    specs, of = specs_mixed(), rules(name)
    costs = [of[name] if is_matrix(spec) else of["adamw"] for spec in specs]
    return make_plan(strategy, specs, costs, dp, tp, PlanOptions(bucket_elements=size))


def _engine(rank: int, world: int, strategy: str, name: str) -> dict[str, Any]:
    """Run the real engine; return the gradients of every step, and the states and masters at the end."""
    mesh, plan = Mesh.create(world, 1, CPU), plan_of(strategy, name, world)
    model = Toy(random_tensors(plan.parameters, 1), plan.parameters, 1, 0)
    options = EngineOptions(clip=0.0, weight_decay=replay.WEIGHT_DECAY)
    engine = Engine(model, plan, rules(name), mesh, options)
    start = {n: m.clone() for buffer in engine.buffers for n, m in buffer.masters.items()}
    gradients: list[dict[str, Tensor]] = []

    def keep() -> None:
        gradients.append(
            {r.name: buffer.gradient(r.start, r.end).clone() for buffer in engine.buffers for r in buffer.runs}
        )

    for step in range(STEPS):
        engine.begin_step()
        with engine.microbatch(last=True):
            model.loss(random_tensors(plan.parameters, 7, rank, step)).backward()
        engine.step(RATE, adjust=keep)
    return {"start": start, "gradients": gradients, **outcome(engine.buffers, engine.states)}


def outcome(buffers: Any, states: Any) -> dict[str, Any]:
    masters = {name: master.clone() for buffer in buffers for name, master in buffer.masters.items()}
    return {"masters": masters, "states": {n: {k: t.clone() for k, t in s.items()} for n, s in states.items()}}


def replayed(plan: Plan, name: str, place: Place, recorded: dict[str, Any]) -> dict[str, Any]:
    share = Share(plan, rules(name), place, CPU, torch.float32)
    for buffer in share.buffers:
        for run_name, master in buffer.masters.items():
            master.copy_(recorded["start"][run_name])
    for gradients in recorded["gradients"]:
        for buffer in share.buffers:
            for run_name, gradient in buffer.gradients_by_run.items():
                gradient.copy_(gradients[run_name])
        share.step(RATE, 1.0)
    return outcome(share.buffers, share.updater.states)


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Names of masters and state tensors that are not bit for bit alike in both."""
    flat = [{**x["masters"], **{f"{n}/{k}": t for n, s in x["states"].items() for k, t in s.items()}} for x in (a, b)]
    names = flat[0].keys() | flat[1].keys()
    return sorted(n for n in names if n not in flat[0] or n not in flat[1] or not torch.equal(flat[0][n], flat[1][n]))


@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "name"), [("canzona", "muon"), ("asc", "soap"), ("sc", "basis-rotation")])
def test_a_replay_computes_what_the_engines_rank_computes(strategy: str, name: str) -> None:
    plan = plan_of(strategy, name, 2)
    for rank, recorded in enumerate(run_ranks(_engine, 2, strategy, name)):
        found = replayed(plan, name, Place(rank, 0), recorded)
        assert differences(recorded, found) == []
        assert any(t.abs().sum() > 0 for s in found["states"].values() for t in s.values())
        # the controls: a step too few, and a matrix that is left out
        fewer = {**recorded, "gradients": recorded["gradients"][:-1]}
        assert len(differences(recorded, replayed(plan, name, Place(rank, 0), fewer))) > 3
        dropped, gone = without_a_matrix(plan, rank)
        lacking = differences(recorded, replayed(dropped, name, Place(rank, 0), recorded))
        assert gone in lacking


def without_a_matrix(plan: Plan, rank: int) -> tuple[Plan, str]:
    """Return the plan in which rank ``rank`` does not own its first matrix, and the matrix's name."""
    gone = plan.micro_groups[rank][0].parameters[0]
    families = tuple(
        dataclasses.replace(
            family,
            buckets=tuple(
                dataclasses.replace(b, slots=tuple(s for s in b.slots if s.parameter != gone)) for b in family.buckets
            ),
        )
        for family in plan.families
    )
    groups = tuple(
        tuple(
            dataclasses.replace(
                g,
                parameters=tuple(p for p in g.parameters if p != gone),
                hosts=tuple(h for p, h in zip(g.parameters, g.hosts, strict=True) if p != gone),
            )
            for g in of_rank
        )
        for of_rank in plan.micro_groups
    )
    groups = tuple(tuple(g for g in of_rank if g.parameters) for of_rank in groups)
    return dataclasses.replace(plan, families=families, micro_groups=groups), plan.parameters[gone].name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensor_parallel_ranks_update_what_they_own_from_what_they_host(dtype: torch.dtype) -> None:
    plan = plan_of("canzona", "muon", 2, 2)
    for place in (Place(d, t) for d in range(2) for t in range(2)):
        share = Share(plan, rules("muon"), place, CPU, dtype)
        for _ in range(2):
            share.draw()
            share.step()
        masters = {name: m for buffer in share.buffers for name, m in buffer.masters.items()}
        assert all(m.abs().sum() > 0 and m.isfinite().all() for m in masters.values()), "everything was updated"
        hosts = replay._hosts(plan, place.dp_rank)
        hosted = {plan.parameters[p].name for p, h in hosts.items() if h in (place.tp_rank, EVERY)}
        assert {n for n in share.updater.states if ":" not in n} == hosted
        if dtype == torch.bfloat16:
            rounded = share.buffers[0]._rounded
            assert all(torch.equal(rounded[n], m.to(dtype)) for n, m in share.buffers[0].masters.items())


def test_the_loop_back_fills_all_that_is_received() -> None:
    group = Loopback(2, 0)
    for sent in ([1.0, 2.0], []):
        out = torch.zeros(5)
        group.all_to_all(out, torch.tensor(sent), [2, 3], [1, 1], "x").wait()
        assert (out != 0).all()


def test_equal_shares_are_one_and_all_ranks_are_somewhere() -> None:
    same = replay.distinct(plan_of("sc", "muon", 3), [Place(d, 0) for d in range(3)])
    assert [len(members) for _, members in same] == [3], "under SC every rank does the same"
    plan = plan_of("canzona", "muon", 3)
    places = [Place(d, 0) for d in range(3)]
    found = replay.distinct(plan, places)
    assert sorted(place.dp_rank for _, members in found for place in members) == [0, 1, 2]
    by_work = {replay.flops(plan, rules("muon"), place) for place in places}
    assert len(found) >= len(by_work) > 1


def test_work_and_memory_are_those_of_the_plan() -> None:
    of = rules("muon")
    for strategy, tp in (("canzona", 2), ("asc", 1), ("sc", 1)):
        plan = plan_of(strategy, "muon", 2, tp)
        places = [Place(d, t) for d in range(2) for t in range(tp)]
        total = sum(replay.flops(plan, of, place) for place in places)
        once = sum(
            (of["muon"] if is_matrix(spec) else of["adamw"]).flops(shape)
            for spec in plan.parameters
            for shape in spec.matrices
        )
        gaps = 1.05  # elementwise runs go over the gaps that align parameters
        if strategy == "asc":
            assert once <= total <= gaps * once
        else:  # what TP does not cut, or all of it, is done twice
            assert once < total <= gaps * 2 * once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strategy", ["sc", "nv-layerwise", "canzona"])
def test_memory_is_what_a_share_holds_and_three_times_its_largest_group(
    strategy: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TP, too, where SC and NV-layerwise update every matrix of a group on every rank."""
    hosted: list[int] = []
    real = Exchange.start_scatter

    def spy(self: Exchange, updates: Any) -> None:
        hosted.append(sum(4 * update.numel() for update in updates.values()))
        real(self, updates)

    monkeypatch.setattr(Exchange, "start_scatter", spy)
    of, plan = rules("muon"), plan_of(strategy, "muon", 2, 2)
    for place in (Place(d, t) for d in range(2) for t in range(2)):
        hosted.clear()
        share = Share(plan, of, place, CPU, dtype)
        share.draw()
        share.step()
        tensors = [t for b in share.buffers for t in (*b.gradients_by_run.values(), *b._rounded.values())]
        tensors += [t for b in share.buffers for t in b.masters.values() if dtype != torch.float32]
        held = sum(t.numel() * t.element_size() for t in tensors) + share.updater.states.bytes()
        largest = max(hosted, default=0)
        assert replay.share_bytes(plan, of, place, dtype.itemsize) == held + 3 * largest
        if strategy != "canzona":
            assert largest > 0, "every rank hosts what it owns"
            assert any(EVERY in group.hosts for group in plan.micro_groups[place.dp_rank])


def test_a_sample_is_the_mean_of_a_period() -> None:
    class Fake:
        drawn = 0

        def draw(self) -> None:
            self.drawn += 1

        def step(self) -> None: ...

    fake, calls = Fake(), Counter[str]()
    clock = iter([100.0, 100.0, 1.0, 1.0, 4.0, 2.0, 2.0, 2.0])

    def before() -> None:
        calls["before"] += 1

    times = replay.time_share(fake, 2, 3, lambda _: next(clock), before)  # type: ignore[arg-type]
    assert times == [2.0, 2.0]
    assert calls["before"] == fake.drawn == 8
    assert replay.period_of(rules("soap")) == 2


def test_the_summary_takes_the_slowest() -> None:
    spec = ReplaySpec(model="qwen3-tiny", dp=3)
    rows = [
        {"rank": 0, "ranks": [0, 1], "flops": 4.0, "seconds": 2.0, "samples": [2.0, 2.0, 5.0]},
        {"rank": 2, "ranks": [2], "flops": 10.0, "seconds": 5.0, "samples": [5.0, 1.0, 6.0]},
    ]
    found = summary(spec, rows)
    assert (found["step_s"], found["slowest_rank"], found["mean_s"]) == (5.0, 2, 3.0)
    assert found["planned_flops_ratio"] == pytest.approx(10 / 6)
    together = summary(ReplaySpec(model="qwen3-tiny", dp=3, processes=2), rows)
    assert together["step_s"] == 5.0
    rows[0]["samples"] = [7.0, 7.0, 1.0]
    assert summary(ReplaySpec(model="qwen3-tiny", dp=3, processes=2), rows)["step_s"] == 7.0
    nothing = summary(spec, [{"rank": 0, "ranks": [0], "flops": 1.0, "note": "needs 9.0 GB, 1.0 GB are free"}])
    assert "step_s" not in nothing


SMALL = ["--model", "qwen3-tiny", "--layers", "2", "--device", "cpu", "--samples", "2"]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("processes", [1, 2])
def test_the_command(processes: int, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "r.json"
    words = [*SMALL, "--dp", "2", "--set", "plan.bucket_elements=9000", "--processes", str(processes)]
    assert main(["replay", *words, "--json", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(rank for share in found["shares"] for rank in share["ranks"]) == [0, 1]
    assert found["step_s"] > 0
    assert found["kind"] == "measured"
    assert json.loads(out.read_text())["step_s"] == found["step_s"]
    assert json.loads(out.read_text())["hardware"]["cores"]


@pytest.mark.slow
def test_a_share_that_does_not_fit_says_so(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", "qwen3-32b", "--layers", "64", "--device", "cpu", "--strategy", "sc", "--samples", "1"]
    assert main(["replay", *words, "--optimizer", "soap"]) == 0
    text = capsys.readouterr().out
    assert " GB are free" in text
    assert "optimizer step" not in text


def test_the_check_pairs_step_and_replay() -> None:
    rows = [
        {"system": "a", "step": i, "real_s": real, "replay_s": again}
        for i, (real, again) in enumerate([(1.0, 1.1), (10.0, 11.0), (2.0, 2.2)])
    ]
    (found,) = replay_check.summary(rows)
    assert (found["real_s"], found["replay_s"], found["n"]) == (2.0, 2.2, 3)
    assert found["ratio"] == pytest.approx(1.1), "a slow moment is slow on both sides"
    assert found["ratio_q75"] - found["ratio_q25"] < 1e-9


@pytest.mark.slow
@pytest.mark.distributed
def test_the_check_runs_steps_and_replays_in_turns(tmp_path: Path, capsys: Any) -> None:
    base = {"model": "qwen3-tiny", "layers": 2, "dp": 2, "batch": 4, "sequence": 16, "plan": {"bucket_elements": 9000}}
    systems = [{"id": s, "name": s, "strategy": s} for s in ("sc", "canzona")]
    path = tmp_path / "c.yaml"
    path.write_text(json.dumps({"base": base, "systems": systems, "repetitions": 2, "warmup": 1}))
    assert main(["replay", "--check", str(path), "--json"]) == 0
    text = capsys.readouterr().out
    found = json.loads(text[text.index("[") :])
    assert [(row["system"], row["n"]) for row in found] == [("sc", 2), ("canzona", 2)]
    assert all(row["real_s"] > 0 and row["replay_s"] > 0 for row in found)
    live = {"id": "live", "name": "x", "strategy": "nv-layerwise", "nv_version": "ping-pong", "live": True}
    path.write_text(json.dumps({"base": base, "systems": [live]}))
    assert main(["replay", "--check", str(path)]) == 2
    assert "leave live systems out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no model given"),
        (["--model", "qwen3-tni"], "did you mean 'qwen3-tiny'"),
        ([*SMALL, "--strategy", "canzone"], "did you mean 'canzona'"),
        ([*SMALL, "--ranks", "7"], "rank 7 is not in a 1 x 1 mesh"),
        ([*SMALL, "--ranks", "x"], "write all, heaviest"),
        ([*SMALL, "--set", "plan.alpa=1"], "did you mean 'alpha'"),
        ([*SMALL, "--dp", "0"], "dp"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: Any) -> None:
    assert main(["replay", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
