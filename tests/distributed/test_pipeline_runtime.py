"""One process per stage computes what the simulator computes, bit for bit, whatever the timing; and nothing hangs."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from impl.canzona.mesh import Mesh
from impl.harness.pipeline_run import open_replica, prepare, stage_options
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.schedule import learning_rate
from impl.harness.spec import parse
from impl.rotation import runtime
from impl.rotation.links import connect, received_before
from impl.rotation.rules import build
from impl.rotation.simulator import build_stages, simulate
from tests.distributed.ranks import RankError, one_rank, run_ranks

pytestmark = pytest.mark.distributed
CPU = torch.device("cpu")
TINY = {
    "model": "qwen3-tiny",
    "layers": 4,
    "batch": 2,
    "sequence": 8,
    "eval_every": 2,
    "data": {"heldout_sequences": 9},  # two chunks, the second of one sequence
    "schedule": {"warmup_steps": 2},
    "lr": 0.02,
    "process": {"device": "cpu"},
}


def case(method, stages, steps, settings=None, **more):
    return {**TINY, "method": method, "stages": stages, "steps": steps, "method_settings": settings or {}, **more}


class Seen:
    """A report that remembers."""

    def __init__(self):
        self.losses, self.heldouts, self.passes = [], [], []

    def step(self, update, loss):
        assert update == len(self.losses) + 1
        self.losses.append(loss)

    def heldout(self, update, loss):
        self.heldouts.append((update, loss))

    def passed(self, update):
        self.passes.append(update)


def state_of(stage):
    stage.engine.synchronize()
    return {name: tensor.clone() for name, tensor in stage.engine.state_dict().items()}


def simulated(data):
    """The same run in this process: losses, held-out losses, digest, versions, peaks, and every stage's state."""
    spec = parse(PipelineSpec, data)
    setup = prepare(spec)
    torch.set_num_threads(1)
    with one_rank():
        stages = build_stages(
            setup.model,
            setup.parts,
            setup.schedule,
            setup.method,
            Mesh.create(1, 1, CPU),
            lambda update: learning_rate(spec.schedule, spec.lr, update, spec.steps),
            seed=spec.seed,
            options=stage_options(spec),
        )
        found = simulate(stages, setup.schedule, open_replica(spec, setup, 0), eval_every=spec.eval_every)
        states = [state_of(stage) for stage in stages]
    versions = [[list(e[1:]) for e in found.log if e.stage == k] for k in range(spec.stages)]
    return {
        "losses": found.losses,
        "heldouts": found.heldout,
        "digest": found.params_digest,
        "versions": versions,
        "peaks": list(found.peak_versions),
        "states": states,
    }


def run_cases(rank, world, cases):
    """Every case on these ranks, with a random delay before every action."""
    return [run_case(rank, data) for data in cases]


def run_case(rank, data, schedule=None):
    spec = parse(PipelineSpec, data)
    setup = prepare(spec)
    if schedule is not None:
        setup = dataclasses.replace(setup, schedule=schedule)
    delays, seen = random.Random(rank), Seen()
    runner = runtime.build(spec, setup, CPU, seen, before=lambda _: time.sleep(delays.random() * 0.004))
    finished = runner.run()
    facts = runner.facts(diverged=not finished)
    state, newest = state_of(runner.stage), [t.clone() for t in runner.stage.engine.weights]
    return {"seen": vars(seen), "facts": facts, "state": state, "weights": newest, "finished": finished}


def wrong_delay(rank, world, data):
    """Two stages of which the first runs no forward ahead, as if its staleness were 0 instead of 1."""
    right = prepare(parse(PipelineSpec, data)).schedule
    eager = build("1f1b-async", 1, right.updates).actions[0]
    return run_case(rank, data, dataclasses.replace(right, actions=(eager, eager)))


def differences(ranks, expected, replicas=1):
    """What differs between a run on ranks and the simulator."""
    first, last = ranks[0], ranks[-replicas]
    pairs = {
        "losses": (last["seen"]["losses"], expected["losses"]),
        "heldouts": (last["seen"]["heldouts"], expected["heldouts"]),
        "digest": (first["facts"]["params_digest"], expected["digest"]),
        "versions": (first["facts"]["versions"], expected["versions"]),
        "peaks": (first["facts"]["peak_stash_versions"], expected["peaks"]),
        "passes": (first["seen"]["passes"], list(range(1, len(expected["losses"]) + 1))),
    }
    found = [name for name, (a, b) in pairs.items() if a != b]
    for stage, state in enumerate(expected["states"]):
        mine = ranks[stage * replicas]["state"]
        assert mine.keys() == state.keys()
        found += [f"stage {stage} {name}" for name, t in state.items() if not torch.equal(mine[name], t)]
    return found


ROTATION = {"period": 2}
STAGE_AWARE = {**ROTATION, "allocation": "stage-aware", "stagger": True}
CASES = {
    1: [case("pipedream", 1, 3), case("basis-rotation", 1, 3, ROTATION)],
    2: [
        *(case(method, 2, steps, settings) for method, settings in (("pipedream", {}), ("basis-rotation", ROTATION))
          for steps in (1, 4)),
        case("basis-rotation", 2, 5, ROTATION, layer_counts=[3, 1]),
        case("pipedream", 2, 4, mode="no-stash-recompute"),
        case("pipemare", 2, 5),
        case("weight-prediction", 2, 5),
        case("delay-compensation", 2, 5),
        case("pipedream", 2, 4, mode="vertical-sync", recompute="stage"),
        case("pipedream-2bw", 2, 3, batch=5),
        case("gpipe", 2, 3, batch=5, microbatches=3),
        case("1f1b-flush", 2, 3, batch=5, microbatches=4),
    ],
    4: [
        *(case(method, 4, steps, settings) for method, settings in (("pipedream", {}), ("basis-rotation", ROTATION))
          for steps in (2, 3, 6)),
        case("basis-rotation", 4, 5, STAGE_AWARE, layer_counts=[1, 0, 2, 1]),
        case("nesterov", 4, 5, recompute="stage"),
        case("1f1b-flush", 4, 2, batch=5, microbatches=2),
        case("gpipe", 4, 2, batch=5, microbatches=3),
        *(case(method, 4, 9, settings, drain_every=4, recompute="selective-attention")
          for method, settings in (("pipedream", {}), ("basis-rotation", ROTATION))),
        case("pipedream", 4, 5, recompute="stage", stash_on_cpu=True),
    ],
}  # fmt: skip


@pytest.mark.parametrize("stages", CASES)
def test_equal_to_the_simulator(stages):
    """Losses, held-out losses, weights, optimizer state, versions and peaks, with random delays before every action."""
    ranks = run_ranks(run_cases, stages, CASES[stages], timeout=120)
    for number, data in enumerate(CASES[stages]):
        found = differences([rank[number] for rank in ranks], simulated(data))
        assert not found, (data, found)


def test_a_delay_that_is_off_by_one_is_found():
    data = case("pipedream", 2, 4)
    found = differences(run_ranks(wrong_delay, 2, data), simulated(data))
    assert {"losses", "digest", "versions"} <= set(found)


def test_no_stash_is_found():
    """The runs of the two modes differ, so the equality above tells them apart."""
    stash, none = (simulated(case("pipedream", 2, 4, mode=mode)) for mode in ("stash", "no-stash-recompute"))
    assert stash["digest"] != none["digest"]


def test_running_on_is_not_draining():
    """The runs with and without segments differ, so the equality above tells them apart."""
    drained, running_on = (simulated(case("pipedream", 4, 9, drain_every=every)) for every in (4, 0))
    assert drained["losses"][:4] == running_on["losses"][:4]
    assert drained["losses"][4] != running_on["losses"][4]  # on weights of update 4 and of update 1
    assert drained["digest"] != running_on["digest"]


def test_replicas_share_the_batch():
    """Two replicas of two stages agree bit for bit, and with AdamW losses are those of one replica but for rounding.

    The mean over replicas adds up gradients in another order; rotation turns that rounding into other bases of the
    directions in which the first gradients have nothing.
    """
    cases = [case("pipedream", 2, 4, batch=4), case("basis-rotation", 2, 4, ROTATION, batch=4)]
    ranks = run_ranks(run_cases, 4, [{**data, "replicas": 2} for data in cases], timeout=90)
    for number, data in enumerate(cases):
        found = [rank[number] for rank in ranks]
        assert found[0]["facts"]["versions"] == simulated(data)["versions"]
        assert len(found[0]["facts"]["params_digest"]) == 64
        assert [f["seen"]["losses"] != [] for f in found] == [False, False, True, False]
        for one, other in ((0, 1), (2, 3)):
            assert all(map(torch.equal, found[one]["weights"], found[other]["weights"]))
    assert ranks[2][0]["seen"]["losses"] == pytest.approx(simulated(cases[0])["losses"], rel=1e-4)


def test_divergence_stops_every_stage():
    data = case("pipedream", 4, 50, lr=1e30, schedule={"warmup_steps": 0})
    ranks = run_ranks(run_cases, 4, [data])
    assert not any(rank[0]["finished"] for rank in ranks)
    assert ranks[0][0]["facts"]["diverged"]
    losses = ranks[-1][0]["seen"]["losses"]
    assert not torch.isfinite(torch.tensor(losses[-1]))
    assert len(losses) < 50


def wait_for_a_silent_peer(rank, world):
    place = connect(2, 1, CPU, timedelta(seconds=2))
    if rank == 1:
        assert place.forward_in is not None
        begin = time.monotonic()
        with pytest.raises(RuntimeError):
            place.forward_in.receive((1, 1, 1))
        assert time.monotonic() - begin < 20
    dist.barrier()
    return True


def test_a_receive_without_a_send_ends():
    assert run_ranks(wait_for_a_silent_peer, 2, timeout=40) == [True, True]


def both_send_first(rank, world):
    """Many large messages in both directions before either side receives: more than any socket holds."""
    place = connect(2, 1, CPU, timedelta(seconds=20))
    out = place.forward_out if rank == 0 else place.backward_out
    into = place.backward_in if rank == 0 else place.forward_in
    assert out is not None
    assert into is not None
    shape = (64, 64, 64)
    for number in range(16):
        out.send(torch.full(shape, float(number)), stop=number == 15)
    flags = []
    for number in range(16):
        tensor, stop = into.receive(shape)
        assert torch.equal(tensor, torch.full(shape, float(number)))
        flags.append(stop)
    out.settle()
    return flags


def test_sends_never_wait_for_each_other():
    assert run_ranks(both_send_first, 2, timeout=40) == [[False] * 15 + [True]] * 2


def test_messages_are_freed_once_the_peer_must_have_them():
    """Gradient t from stage k of 4 says that it has the activations that it needed up to then."""
    actions = build("1f1b-async", 4, 9).actions
    acknowledged = received_before(actions[2], "F", "B")
    assert acknowledged == {t: min(t + 2, 9) for t in range(9)}
    assert received_before(actions[3], "F", "B") == {t: t + 1 for t in range(9)}


def run_command(out: Path, kind: str) -> dict:
    command = [sys.executable, "-m", "impl", "pipeline", "--model", "qwen3-tiny", "--stages", "2", "--steps", "5"]
    command += ["--runtime", kind, "--json", "--out", str(out), "--target", "5.4", "--layers", "2"]
    for setting in ("batch=2", "sequence=8", "eval_every=2", "process.device=cpu", "period=1"):
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_command_line_prints_the_same_for_both(tmp_path):
    simulator, processes = (run_command(tmp_path / kind, kind) for kind in ("simulator", "processes"))
    differ = {key for key in simulator if simulator[key] != processes[key]}
    assert simulator.keys() == processes.keys()
    assert differ <= {"runtime", "seconds"}
    versions = [(tmp_path / kind / "versions.json").read_text() for kind in ("simulator", "processes")]
    assert versions[0] == versions[1]
    assert json.loads((tmp_path / "processes" / "manifest.json").read_text())["status"] == "done"


def test_too_few_processes_are_refused():
    """A wrong number of processes is an error on every rank, not a hang."""
    with pytest.raises(RankError, match="3 x 1 processes are needed, there are 2"):
        run_ranks(run_cases, 2, [case("pipedream", 3, 2)])
