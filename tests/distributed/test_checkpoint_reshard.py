"""Checkpoints of the engine against the one-process reference: every global tensor, under every other layout.

After three steps on one mesh the state is saved, loaded on another, compared bit by bit with the reference's whole
tensors, and three more steps are taken and compared again: also bit by bit, because gradients are summed in rank order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from impl.canzona import rectangles
from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.mesh import Mesh
from impl.canzona.portable import check_replicas, export
from impl.canzona.strategies import PlanOptions, make_plan
from impl.harness import step_folders
from impl.harness.checkpoint import Checkpoints, Meta
from impl.models.parameters import Fragment, ParamSpec
from impl.optimizers.base import Optimizer, create, registry
from tests.distributed.ranks import RankError, run_ranks
from tests.distributed.reference import Reference
from tests.distributed.toy import Toy, is_matrix, random_tensors, specs_mixed

pytestmark = pytest.mark.distributed
SPECS = (*specs_mixed()[:-1], ParamSpec("tiny_norm.weight", (2,)), ParamSpec("head.weight", (35, 6), tp_dim=0))
UNPADDED = {"head.weight": (35, 6)}
OPTIONS = EngineOptions(reduction="rank-order", clip=1.0, weight_decay=0.01)
SETTINGS: dict[str, dict[str, Any]] = {
    "basis-rotation": {"period": 2, "stagger": True, "nesterov": True, "max_side": 10, "beyond": "blocks"},
    "soap": {"period": 2},
    "shampoo": {"period": 2},
}
LR = 0.05
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class System:
    """A mesh and a strategy; dp and tp must match the number of ranks that run it."""

    dp: int
    tp: int
    strategy: str = "canzona"
    nv_version: str = "lpt-ns"
    split: str = "none"
    offload: bool = False

    @property
    def name(self) -> str:
        where = "host" if self.offload else "device"
        return f"{self.strategy}-{self.nv_version}-{self.split}-{where}-{self.dp}x{self.tp}"


@dataclass(frozen=True)
class Job:
    """Train ``optimizer`` on ``saved`` and save, or load and go on on ``loaded``; a rank does what fits its world."""

    optimizer: str
    saved: System
    loaded: tuple[System, ...] = field(default=())
    dtype: str = "float32"

    def folder(self, root: str) -> Path:
        return Path(root) / f"{self.optimizer}-{self.dtype}-{self.saved.name}"


def specs(tp: int, split: str = "none") -> list[ParamSpec]:
    """Pad the vocabulary to a multiple of 2 per TP rank, or 4 over several; give fused matrices their fragments."""
    head = ParamSpec("head.weight", (36 if tp == 1 else 40, 6), tp_dim=0)
    padded = [head if s.name == head.name else s for s in SPECS]
    parts = {"a_fc1.weight": (Fragment("gate", ((0, 8),)), Fragment("up", ((8, 16),))),
             "a_qkv.weight": (Fragment("q", ((0, 4), (7, 11))), Fragment("k", ((4, 7), (11, 14))))}  # fmt: skip
    return [replace(s, fragments=parts.get(s.name, ())) for s in padded] if split != "none" else padded


def optimizers(name: str) -> dict[str, Optimizer]:
    matrix = create(name, SETTINGS.get(name))
    return {name: matrix, "nadam": create("nadam")} if matrix.atomic else {name: matrix}


def routed(name: str) -> dict[str, Optimizer]:
    rules = list(optimizers(name).values())
    return {spec.name: rules[0] if is_matrix(spec) else rules[-1] for spec in SPECS}


def padded(tensors: Mapping[str, Tensor], tp: int) -> Tensors:
    def fill(spec: ParamSpec) -> Tensor:
        out = torch.zeros(spec.shape)
        out[: tensors[spec.name].shape[0]] = tensors[spec.name]
        return out

    return {spec.name: fill(spec) for spec in specs(tp)}


def gradients(dp_rank: int, step: int) -> Tensors:
    return random_tensors(SPECS, 7, dp_rank, step)


def start(mesh: Mesh, job: Job, system: System, seed: int = 1) -> tuple[Toy, Engine]:
    parameters = specs(mesh.tp, system.split)
    model = Toy(padded(random_tensors(SPECS, seed), mesh.tp), parameters, mesh.tp, mesh.tp_rank,
                dtype=getattr(torch, job.dtype))  # fmt: skip
    rules = routed(job.optimizer)
    options = PlanOptions(bucket_elements=100, capacity_bytes=600, nv_version=system.nv_version, fallback=False,
                          split=system.split)  # type: ignore[arg-type]  # fmt: skip
    plan = make_plan(system.strategy, parameters, [rules[s.name] for s in parameters], mesh.dp, mesh.tp, options)
    return model, Engine(model, plan, optimizers(job.optimizer), mesh, replace(OPTIONS, offload=system.offload))


def train(model: Toy, engine: Engine, steps: range) -> None:
    for step in steps:
        with engine.microbatch(last=True):
            model.loss(padded(gradients(engine.mesh.dp_rank, step), engine.mesh.tp)).backward()
        engine.step(LR)
    engine.synchronize()


def reference(job: Job, stages: Sequence[tuple[System, range]]) -> Tensors:
    """Return the whole tensors of a checkpoint after ``stages``, each on its mesh."""
    rules, split = routed(job.optimizer), specs(1, job.saved.split)
    unpadded = [replace(s, shape=UNPADDED.get(s.name, s.shape)) for s in split]
    twin = Reference(random_tensors(SPECS, 1), unpadded, rules, OPTIONS, stages[0][0].tp)
    for index, spec in enumerate(unpadded):
        for number, state in enumerate(twin.states[spec.name]):
            twin.optimizers[spec.name].place(state, index + number)
    for system, steps in stages:
        twin.tp = system.tp
        for step in steps:
            twin.step([gradients(rank, step) for rank in range(system.dp)], LR)
    out = {f"master/{name}": tensor for name, tensor in twin.parameters.items()}
    for spec in unpadded:
        names = [f"{spec.name}/{fragment.name}" for fragment in spec.fragments] or [spec.name]
        for name, state in zip(names, twin.states[spec.name], strict=True):
            out |= {f"state/{name}/{key}": tensor for key, tensor in state.items()}
    return out | {"step": torch.tensor(twin.steps), "skips": torch.tensor(0)}


def wrong(engine: Engine, expected: Tensors) -> list[str]:
    """Return the tensors of which this rank holds other elements than ``expected``."""
    tree = export(engine, UNPADDED)
    found = [key for key in tree if key not in expected]
    for key, tensor in tree.items():
        for piece in tensor.rectangles:
            place = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.tensor.shape, strict=True))
            if key in expected and not torch.equal(piece.tensor, expected[key][place]):
                found.append(key)
    return sorted(set(found))


def assembled(path: Path) -> Tensors:
    """Return the whole tensors of a checkpoint, put together from its files alone; every element must be there once."""
    files = {p.name: load_file(p) for p in path.glob("*.safetensors")}
    stored = sum(len(tensors) for tensors in files.values())
    out = {}
    for name, tensor in json.loads((path / "index.json").read_text())["tensors"].items():
        whole, seen = torch.zeros(tensor["shape"], dtype=getattr(torch, tensor["dtype"])), torch.zeros(tensor["shape"])
        for piece in tensor["pieces"]:
            place = tuple(slice(o, o + n) for o, n in zip(piece["offsets"], piece["sizes"], strict=True))
            whole[place] = files[piece["file"]][f"{name}@{','.join(map(str, piece['offsets']))}"]
            seen[place] += 1
            stored -= 1
        assert bool((seen == 1).all()), name
        out[name] = whole
    assert stored == 0  # nothing twice
    return out


def different(a: Tensors, b: Tensors) -> list[str]:
    return sorted(k for k in a.keys() | b.keys() if k not in a or k not in b or not torch.equal(a[k], b[k]))


def save(checkpoints: Checkpoints, engine: Engine, step: int) -> None:
    checkpoints.save(engine, Meta(step, "spec", engine.plan.digest, {"toy": True}, {}))


class Ranks:
    """What one world of ranks does for a list of jobs; collects complaints."""

    def __init__(self, world: int, root: str) -> None:
        self.world, self.root, self.complaints = world, root, list[str]()
        self.meshes: dict[tuple[int, int], Mesh] = {}
        self.group: Any = dist.new_group(list(range(world)), backend="gloo")

    def mesh(self, system: System) -> Mesh:
        shape = (system.dp, system.tp)
        if shape not in self.meshes:
            self.meshes[shape] = Mesh.create(*shape, torch.device("cpu"))
        return self.meshes[shape]

    def fits(self, system: System) -> bool:
        return system.dp * system.tp == self.world

    def complain(self, what: str, names: list[str]) -> None:
        if names:
            self.complaints.append(f"{what}: {', '.join(names[:4])} and more ({len(names)})")

    def checkpoints(self, folder: Path) -> Checkpoints:
        return Checkpoints(folder, self.group, UNPADDED)

    def exact(self, job: Job, *systems: System) -> bool:
        """Whether the reference computes the same: not bf16, nor the norm of a matrix that is summed in its parts."""
        return job.dtype == "float32" and all(s.split != "atoms" for s in systems)

    def run_saved(self, job: Job) -> None:
        """Train, save while training goes on, and resume on the same mesh."""
        system, folder = job.saved, job.folder(self.root)
        model, engine = start(self.mesh(system), job, system)
        train(model, engine, range(3))
        checkpoints = self.checkpoints(folder)
        save(checkpoints, engine, 3)
        train(model, engine, range(3, 6))
        checkpoints.wait()
        straight = pieces(engine)
        again, resumed = start(self.mesh(system), job, system, seed=2)
        checkpoints.load(step_folders.path_of(folder, 3), resumed, "advice")
        if self.exact(job, system):
            self.complain(f"{folder.name} saved", different(assembled(folder / "step-000003"),
                                                            reference(job, [(system, range(3))])))  # fmt: skip
            self.complain(f"{folder.name} straight", wrong(engine, reference(job, [(system, range(6))])))
        train(again, resumed, range(3, 6))
        self.complain(f"{folder.name} resumed", different(pieces(resumed), straight))
        self.complain(f"{folder.name} weights", different(again.local(), model.local()))

    def run_loaded(self, job: Job, system: System) -> None:
        """Load on another mesh, save there again, and go on."""
        folder, what = job.folder(self.root), f"{job.folder(self.root).name} on {system.name}"
        model, engine = start(self.mesh(system), job, system, seed=2)
        checkpoints = self.checkpoints(folder / f"on-{system.name}")
        meta = checkpoints.load(step_folders.path_of(folder, 3), engine, "advice")
        assert (meta.step, engine.steps, meta.settings) == (3, 3, {"toy": True})
        if self.exact(job, job.saved, system):
            self.complain(f"{what} loaded", wrong(engine, reference(job, [(job.saved, range(3))])))
        save(checkpoints, engine, 3)
        checkpoints.wait()
        there = assembled(folder / f"on-{system.name}" / "step-000003")
        self.complain(f"{what} saved again", different(there, assembled(folder / "step-000003")))
        train(model, engine, range(3, 6))
        if self.exact(job, job.saved, system):
            expected = reference(job, [(job.saved, range(3)), (system, range(3, 6))])
            self.complain(f"{what} continued", wrong(engine, expected))


def pieces(engine: Engine) -> Tensors:
    """Return copies of all that this rank keeps."""
    return {f"{key}@{p.offsets}": p.tensor.clone() for key, t in export(engine).items() for p in t.rectangles}


def run(rank: int, world: int, root: str, jobs: list[Job], break_offsets: bool) -> list[str]:
    ranks = Ranks(world, root)
    if break_offsets:
        right = rectangles._unsharded
        rectangles._unsharded = lambda local, spec, tp, r: right(local, replace(spec, blocks=()), tp, r)
    for job in jobs:
        if ranks.fits(job.saved):
            ranks.run_saved(job)
        for system in job.loaded:
            if ranks.fits(system):
                ranks.run_loaded(job, system)
    return ranks.complaints


def complaints(world: int, root: Path, jobs: list[Job], *, break_offsets: bool = False) -> list[str]:
    return [line for of_rank in run_ranks(run, world, str(root), jobs, break_offsets, timeout=300) for line in of_rank]


def test_every_optimizer_goes_on_under_another_layout(tmp_path: Path) -> None:
    """DP2 x TP1 to DP1 x TP2 and back, Canzona to SC and back, NV-layerwise to Canzona."""
    dp, tp, sc = System(2, 1), System(1, 2), System(2, 1, "sc")
    nv, sc_tp = System(2, 1, "nv-layerwise", "ping-pong"), System(1, 2, "sc")
    jobs = [
        job
        for name in registry()
        for job in (Job(name, dp, (tp, sc)), Job(name, tp, (dp, sc_tp)), Job(name, sc, (dp,)), Job(name, nv, (dp, tp)))
    ]
    jobs += [Job(name, dp, (tp, sc), dtype="bfloat16") for name in ("muon", "soap")]
    jobs += [Job("soap", replace(dp, offload=True), (tp, replace(sc_tp, offload=True)))]  # state in host memory
    assert complaints(2, tmp_path, jobs) == []
    for job in jobs:
        assert [p.name for p in job.folder(str(tmp_path)).glob("step-*")] == ["step-000003"]


def test_dp3_goes_on_as_dp2(tmp_path: Path) -> None:
    """Cuts that divide nothing evenly, and a vector of two elements over three ranks."""
    jobs = [Job(name, System(3, 1), (System(2, 1), System(1, 2))) for name in ("muon", "basis-rotation", "adamw")]
    assert complaints(3, tmp_path, jobs) == []
    assert complaints(2, tmp_path, jobs) == []


@pytest.mark.slow
def test_dp2_tp2_goes_on_on_one_rank_and_on_four(tmp_path: Path) -> None:
    jobs = [Job(name, System(2, 2), (System(1, 1), System(4, 1), System(2, 2, "nv-layerwise")))
            for name in ("muon", "soap")]  # fmt: skip
    assert complaints(4, tmp_path, jobs) == []
    assert complaints(1, tmp_path, jobs) == []


def test_a_split_matrix_may_have_other_owners_but_not_be_joined(tmp_path: Path) -> None:
    """``split: update`` and ``split: atoms`` keep the same states, whoever plans them."""
    update, atoms = System(2, 1, split="update"), System(1, 2, split="atoms")
    here = System(1, 2, "sc", split="update")
    jobs = [Job(name, a, b) for name in ("muon", "soap") for a, b in ((update, (atoms, here)), (atoms, (update,)))]
    assert complaints(2, tmp_path, jobs) == []
    with pytest.raises(RankError, match=r"it has state/a_fc1.weight/gate/momentum, which this run has not\): advice"):
        complaints(2, tmp_path, [Job("muon", update, (System(2, 1),))])


def test_a_rectangle_at_a_wrong_offset_is_found(tmp_path: Path) -> None:
    """Negative control: gate and up as one block, so that their shards change places."""
    job = Job("muon", System(1, 2))
    assert complaints(2, tmp_path / "right", [job]) == []
    found = complaints(2, tmp_path / "wrong", [job], break_offsets=True)
    assert any("master/a_fc1.weight" in line for line in found)
    assert not any("resumed" in line for line in found)  # a test of one mesh alone would not notice


def break_one_bit(rank: int, world: int, cases: list[tuple[int, str]]) -> list[str]:
    said = []
    for tp, name in cases:
        system = System(world // tp, tp)
        model, engine = start(Mesh.create(system.dp, tp, torch.device("cpu")), Job("muon", system), system)
        check_replicas(engine)
        if rank == 1:
            model.get_parameter(name).data.view(-1)[:1].view(torch.int32).add_(1)
        try:
            check_replicas(engine)
            said.append("")
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_replicas_that_differ_in_one_bit_are_named() -> None:
    """Over DP every parameter is a replica; over TP those that are not cut, and only these."""
    expected = ["the replicas of a_fc2.weight differ: rank 1 holds other bits",
                "the replicas of b_norm.weight differ: rank 1 holds other bits", ""]  # fmt: skip
    cases = [(1, "a_fc2.weight"), (2, "b_norm.weight"), (2, "a_fc2.weight")]
    assert run_ranks(break_one_bit, 2, cases) == [expected, expected]
