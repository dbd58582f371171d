"""A pipeline that goes on from a checkpoint computes what it would have without the interruption, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from impl.harness import step_folders
from impl.harness.pipeline_checkpoint import Checkpoints
from impl.harness.pipeline_run import execute, prepare
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.record import CorruptRecord, RunFolder, read_rows
from impl.harness.spec import parse
from impl.rotation import runtime
from tests.distributed.ranks import run_ranks
from tests.distributed.test_pipeline_runtime import CPU, ROTATION, Seen, case, state_of

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).resolve().parents[2]
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


class Rest(Seen):
    """A report that begins anywhere."""

    def step(self, update, loss):
        self.losses.append(loss)


def finish(runner, checkpoints):
    finished = runner.run(checkpoints)
    facts = runner.facts(diverged=not finished)
    return {"facts": facts, "state": state_of(runner.stage)}


def straight_and_resumed(rank, world, cases, folder):
    """Each case from its beginning, then from each of its checkpoints again, by fresh runners."""
    out = []
    for number, data in enumerate(cases):
        spec = parse(PipelineSpec, data)
        setup, run = prepare(spec), RunFolder(Path(folder) / str(number))

        def start(report, spec=spec, setup=setup, run=run):
            runner = runtime.build(spec, setup, CPU, report)
            return runner, Checkpoints(spec, run, [runner.stage], runner.microbatches)

        whole = Seen()
        found = finish(*start(whole)) | {"losses": whole.losses, "resumed": {}}
        # a later run writes the same checkpoints again
        for update in step_folders.steps(run.checkpoints):
            rest = Rest()
            runner, checkpoints = start(rest)
            runner.resume(update, checkpoints)
            in_flight = len(runner.stage.flight)
            again = finish(runner, checkpoints) | {"losses": rest.losses, "in_flight": in_flight}
            found["resumed"][update] = again
        out.append(found)
    return out


def resumable(method, stages, steps, every, settings=None, **more):
    return case(method, stages, steps, settings, checkpoint_every=every, eval_every=0, **more)


CASES = {
    2: [
        resumable("basis-rotation", 2, 5, 2, ROTATION),
        resumable("delay-compensation", 2, 5, 2),
        resumable("pipemare", 2, 5, 3),
        resumable("gpipe", 2, 3, 1, batch=5, microbatches=3),
    ],
    4: [
        resumable("basis-rotation", 4, 7, 3, ROTATION, layer_counts=[1, 0, 2, 1]),
        resumable("pipedream", 4, 7, 2, drain_every=4),
        resumable("weight-prediction", 4, 6, 2, recompute="stage", stash_on_cpu=True),
        resumable("pipedream", 4, 6, 4, mode="vertical-sync", recompute="selective-attention"),
        resumable("nesterov", 2, 4, 2, replicas=2, batch=4),
    ],
}


def documents(folder: Path) -> dict:
    """Data that can be read in order only."""
    draw, file = random.Random(0), folder / "documents.jsonl"
    texts = ["".join(draw.choices("etaoin shrdlu", k=draw.randrange(5, 60))) for _ in range(200)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {"source": str(file), "heldout_sequences": 9}


@pytest.mark.parametrize("world", CASES)
def test_every_checkpoint_leads_to_the_same_end(world, tmp_path):
    cases = [*CASES[world]]
    if world == 2:
        cases.append(resumable("pipedream-2bw", 2, 4, 1, batch=5, microbatches=3, data=documents(tmp_path)))
    ranks = run_ranks(straight_and_resumed, world, cases, str(tmp_path), timeout=150)
    flights = set()
    for number, data in enumerate(cases):
        found = [rank[number] for rank in ranks]
        assert found[0]["resumed"], data
        for update in found[0]["resumed"]:
            for straight in found:
                again = straight["resumed"][update]
                assert again["facts"] == straight["facts"]
                assert again["losses"] == straight["losses"][update:]
                assert again["state"].keys() == straight["state"].keys()
                for name, tensor in straight["state"].items():
                    assert torch.equal(again["state"][name], tensor), (data, update, name)
            flights.add(found[0]["resumed"][update]["in_flight"])
    assert flights >= ({0, 1} if world == 2 else {0, 3})


def settings(stages, **more):
    return case("basis-rotation", stages, 7, ROTATION, **{"layers": stages, "checkpoint_every": 4, **more})


def outcome(out: Path) -> dict:
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["status"] == "done", manifest["error"]
    result = {k: v for k, v in manifest["result"].items() if k != "resumed_from"}
    rows = [{k: v for k, v in row.items() if k != "elapsed"} for row in read_rows(out / "metrics.jsonl")]
    assert [row["step"] for row in rows if row["event"] == "step"] == list(range(1, 8))
    assert [row["step"] for row in rows if row["event"] == "heldout"] == [2, 4, 6, 7]
    return {"result": result, "rows": rows, "versions": (out / "versions.json").read_text()}


KILLED = """
import os, signal, sys
from pathlib import Path
from impl.harness import launch, pipeline_run
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.spec import load_yaml, parse

class Deadly(pipeline_run.Recorder):
    def step(self, update, loss):
        if update == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step(update, loss)

spec, out = parse(PipelineSpec, load_yaml(sys.argv[1])), Path(sys.argv[2])
if spec.runtime == "simulator":
    pipeline_run.Recorder = Deadly
    pipeline_run.execute(spec, out)
else:
    fault = "tests.distributed.faults:kill_pipeline_launcher_at_update_6"
    launch.execute(fault, spec, out, ranks=spec.world_size, runtime=spec.process)
"""


@LINUX
@pytest.mark.parametrize(("kind", "stages"), [("simulator", 4), ("processes", 2), ("processes", 4)])
def test_resumed_after_kill_9_equals_a_straight_run(kind, stages, tmp_path, capfd):
    """The straight run is simulated, without checkpoints."""
    file, killed, straight = tmp_path / "run.yaml", tmp_path / "killed", tmp_path / "straight"
    data = {"data": documents(tmp_path)} if kind == "simulator" else {}  # processes with them are above
    assert execute(parse(PipelineSpec, settings(stages, checkpoint_every=0, **data)), straight) == 0
    spec = parse(PipelineSpec, settings(stages, runtime=kind, **data))
    file.write_text(json.dumps(settings(stages, runtime=kind, **data)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(file), str(killed)]
    done = subprocess.run(command, cwd=ROOT, env=environment, timeout=90, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (killed / "manifest.json").exists()
    steps = [row["step"] for row in read_rows(killed / "metrics.jsonl") if row["event"] == "step"]
    assert steps == [1, 2, 3, 4, 5]
    assert execute(spec, killed) == 0
    assert "resuming after update 4" in capfd.readouterr().out
    assert json.loads((killed / "manifest.json").read_text())["result"]["resumed_from"] == 4
    assert outcome(killed) == outcome(straight)


def one_checkpoint(rank, world, folder):
    spec = parse(PipelineSpec, resumable("pipedream", 1, 3, 2))
    run = RunFolder(folder)

    def start(spec):
        runner = runtime.build(spec, prepare(spec), CPU, Seen())
        return runner, Checkpoints(spec, run, [runner.stage], runner.microbatches)

    runner, checkpoints = start(spec)
    assert runner.run(checkpoints)
    said = []
    for changes in ({"seed": 1}, {"drain_every": 2}, {"mode": "vertical-sync"}):
        _, other = start(spec.model_copy(update=changes))
        with pytest.raises(CorruptRecord) as error:
            other.load(2)
        said.append(str(error.value))
    file = run.checkpoints / "step-000002" / "rank-0.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CorruptRecord) as error:
        start(spec)[1].load(2)
    return [*said, str(error.value)]


def test_checkpoints_of_other_settings_and_damaged_ones_are_refused(tmp_path):
    (said,) = run_ranks(one_checkpoint, 1, str(tmp_path), timeout=60)
    assert all("was written under settings" in text for text in said[:3])
    assert "cannot be read" in said[3]
