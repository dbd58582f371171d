"""Checkpoints of an engine on one rank: written while it goes on, failures, and states that cannot be kept."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.mesh import Mesh
from impl.canzona.portable import export
from impl.canzona.strategies import PlanOptions, make_plan
from impl.harness import step_folders
from impl.harness.checkpoint import Checkpoints, Meta
from impl.harness.record import CorruptRecord
from impl.harness.safetensors_storage import SafetensorsWriter, _crc
from impl.models.parameters import ParamSpec
from impl.optimizers.base import create
from impl.optimizers.nadam import NAdam
from tests.distributed.ranks import one_rank
from tests.distributed.toy import Toy, random_tensors

SPECS = [ParamSpec("a.weight", (4, 6)), ParamSpec("b.weight", (5,)), ParamSpec("c.weight", (3,))]


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    with one_rank() as group:
        yield group


def start(seed: int = 1) -> tuple[Toy, Engine]:
    """A matrix under Muon, and two vectors under NAdam that are updated in one run."""
    mesh = Mesh.create(1, 1, torch.device("cpu"))
    model = Toy(random_tensors(SPECS, seed), SPECS, 1, 0)
    rules = {"muon": create("muon"), "nadam": create("nadam")}
    plan = make_plan("canzona", SPECS, [rules["muon"], rules["nadam"], rules["nadam"]], 1, 1, PlanOptions())
    return model, Engine(model, plan, rules, mesh, EngineOptions())


def train(model: Toy, engine: Engine, steps: range) -> None:
    for step in steps:
        with engine.microbatch(last=True):
            model.loss(random_tensors(SPECS, 7, step)).backward()
        engine.step(0.1)


def held(engine: Engine) -> dict[str, Tensor]:
    return {k: r.tensor.clone() for k, t in export(engine).items() for r in t.rectangles}


def meta(step: int) -> Meta:
    return Meta(step, "spec", "plan", {}, {})


def checkpoints(folder: Path, group: dist.ProcessGroup) -> Checkpoints:
    return Checkpoints(folder, group, {})


def test_it_is_written_while_training_goes_on(
    tmp_path: Path, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, released = SafetensorsWriter.write_data, threading.Event()

    def wait_and_write(self: SafetensorsWriter, *arguments: Any) -> Any:
        assert released.wait(60)
        return write(self, *arguments)

    monkeypatch.setattr(SafetensorsWriter, "write_data", wait_and_write)
    model, engine = start()
    train(model, engine, range(2))
    then, kept = held(engine), checkpoints(tmp_path, alone)
    kept.save(engine, meta(2))
    train(model, engine, range(2, 4))
    assert step_folders.steps(tmp_path) == []
    now = held(engine)
    assert not any(torch.equal(now[key], then[key]) for key in now if key != "skips")
    released.set()
    deadline = time.monotonic() + 60
    while step_folders.steps(tmp_path) != [2]:  # nobody waits for it: it is named as soon as it is whole
        assert time.monotonic() < deadline
    kept.wait()
    _, again = start(seed=2)
    assert kept.load_own(2, again, "spec") == meta(2)
    got = held(again)
    assert got.keys() == then.keys()
    assert all(torch.equal(got[key], then[key]) for key in got)


def test_one_that_cannot_be_written_fails_the_run_and_leaves_the_one_before(
    tmp_path: Path, alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, engine = start()
    kept = checkpoints(tmp_path, alone)
    kept.save(engine, meta(2))
    kept.wait()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SafetensorsWriter, "write_data", full)
    kept.save(engine, meta(4))
    with pytest.raises(RuntimeError, match=r"step 4 could not be written: rank 0: .*No space left on device"):
        kept.save(engine, meta(6))  # which first waits for the one before
    assert step_folders.steps(tmp_path) == [2]
    assert kept.load_own(2, start(seed=2)[1], "spec").step == 2


def test_a_draft_of_a_killed_process_is_never_part_of_a_checkpoint(tmp_path: Path, alone: dist.ProcessGroup) -> None:
    for step in (4, 9):
        (tmp_path / f"step-{step:06d}.tmp").mkdir()
        (tmp_path / f"step-{step:06d}.tmp" / "rank-7.safetensors").touch()
    kept = checkpoints(tmp_path, alone)
    assert step_folders.latest(tmp_path) is None
    for step in (2, 4, 6):
        kept.save(start()[1], meta(step))
    kept.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000004", "step-000006"]
    assert sorted(p.name for p in (tmp_path / "step-000004").iterdir()) == [
        "index.json", "meta.json", "rank-0.safetensors"]  # fmt: skip
    assert (tmp_path / "latest").read_text() == "step-000006\n"


def altered(path: Path, name: str, tensor: Tensor) -> None:
    """Put another tensor in a checkpoint, with its checksum."""
    file, index = path / "rank-0.safetensors", path / "index.json"
    save_file(load_file(file) | {f"{name}@": tensor}, file)
    data = json.loads(index.read_text())
    data["tensors"][name]["pieces"][0]["crc32"] = _crc(tensor)
    index.write_text(json.dumps(data))


def test_scalars_that_went_different_ways_cannot_go_on_together(tmp_path: Path, alone: dist.ProcessGroup) -> None:
    model, engine = start()
    train(model, engine, range(2))
    kept = checkpoints(tmp_path, alone)
    kept.save(engine, meta(2))
    kept.wait()
    altered(tmp_path / "step-000002", "state/c.weight/mu_product", torch.tensor(0.5))
    with pytest.raises(CorruptRecord, match=r"state/c.weight/mu_product is 0.\d+ but state/b.weight/mu_product is 0."):
        kept.load_own(2, start()[1], "spec")


@pytest.mark.parametrize(("step", "spec"), [(1, "spec"), (2, "other")])
def test_one_that_is_not_what_its_name_says_is_refused(
    tmp_path: Path, alone: dist.ProcessGroup, step: int, spec: str
) -> None:
    model, engine = start()
    train(model, engine, range(2))
    kept = checkpoints(tmp_path, alone)
    kept.save(engine, meta(2))
    kept.wait()
    if step != 2:
        (tmp_path / "step-000002").rename(tmp_path / f"step-{step:06d}")
    with pytest.raises(CorruptRecord, match="was written after step 2 under settings spec: delete"):
        kept.load_own(step, start()[1], spec)


def test_an_elementwise_state_of_another_shape_is_refused(alone: dist.ProcessGroup, monkeypatch) -> None:
    init = NAdam.init_state
    monkeypatch.setattr(NAdam, "init_state", lambda *a, **k: init(*a, **k) | {"pair": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"nadam keeps pair of shape \[2\] for a range of \d+ elements: the state of"):
        export(start()[1])
