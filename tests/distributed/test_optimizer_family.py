"""Every optimizer of the registry under every strategy and mesh: bit for bit what one process computes.

One start of the ranks per mesh runs all of it.  Gradients are given from outside, equal in both worlds; the reduction
is in rank order.  Compared are the parameters of every rank, and the masters and states that it owns.  With the float64
twins of tests/unit/test_twins.py this ties each layout to the papers' formulas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.mesh import Mesh
from impl.canzona.states import state_names
from impl.canzona.strategies import PlanOptions, make_plan
from impl.models.parameters import Fragment, ParamSpec
from impl.models.sharding import shard
from impl.optimizers.base import Optimizer, create, registry
from tests.distributed.ranks import run_ranks
from tests.distributed.reference import Reference
from tests.distributed.toy import Toy, is_matrix, random_tensors

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
MESHES = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2)]
SYSTEMS = [("sc", "lpt-ns"), ("asc", "lpt-ns"), ("canzona", "lpt-ns"), ("nv-layerwise", "lpt-ns"),
           ("nv-layerwise", "ping-pong")]  # fmt: skip
LR, DECAY = 0.05, 0.01
OPTIONS = EngineOptions(reduction="rank-order", clip=1.0, weight_decay=DECAY)

MIXED = (
    ParamSpec("embedding.weight", (11, 6)),
    ParamSpec("a_proj.weight", (6, 10), tp_dim=1),
    ParamSpec("a_qkv.weight", (18, 6), tp_dim=0),
    ParamSpec("a_norm.weight", (6,)),
    ParamSpec("a_qnorm.weight", (5,), partial_over_tp=True),
    ParamSpec("a_fc1.weight", (16, 6), tp_dim=0, blocks=(8, 8)),
    ParamSpec("a_fc2.weight", (6, 8), tp_dim=1),
    ParamSpec("b_odd.weight", (9, 13)),
    ParamSpec("c_odd.weight", (9, 13)),
    ParamSpec("b_square.weight", (6, 6)),
    ParamSpec("b_row.weight", (1, 9)),
    ParamSpec("b_large.weight", (16, 32), tp_dim=0),
    ParamSpec("c_large.weight", (16, 32), tp_dim=0),
)
"""Square, tall, wide, a row, odd sides; cut by rows, by columns, in two blocks, not at all; pairs of equal shape."""
QKV = tuple(
    Fragment(name, tuple((group * 6 + low, group * 6 + high) for group in range(3)))
    for name, low, high in (("q", 0, 3), ("k", 3, 5), ("v", 5, 6))
)
"""Three groups of [3 q | 2 k | 1 v] rows: what one kind of head has lies apart, and TP 2 cuts through a group."""
GATE_UP = (Fragment("gate", ((0, 8),)), Fragment("up", ((8, 16),)))
INSIDE = {"a_qkv.weight": QKV, "a_fc1.weight": GATE_UP}
SPLIT = tuple(dataclasses.replace(spec, fragments=INSIDE.get(spec.name, ())) for spec in MIXED)
"""The same with the layout of its two fused matrices."""
FEW = (ParamSpec("only.weight", (6, 4), tp_dim=0), ParamSpec("norm.weight", (3,)))
"""One matrix: on most meshes there are more ranks than that."""

MORE: dict[str, list[dict[str, Any]]] = {
    "basis-rotation": [
        {"source": "1st", "nesterov": True, "max_side": 8, "beyond": "blocks"},
        {"geometry": "unilateral", "period": 1},
    ],
    "muon": [{"coefficients": "polar-express", "ns_dtype": "float32", "nesterov": False}],
    "soap": [{"period": 1, "max_side": 10}],
    "shampoo": [{"root": "coupled-newton", "grafting": "adam", "max_side": 10}],
}
"""Settings to test besides those of :func:`settings_of`."""


def settings_of(name: str) -> dict[str, Any]:
    """Refreshes within the few steps of a test, each matrix in its turn, where an optimizer has such settings."""
    fields = registry()[name].Hyper.model_fields
    return {key: value for key, value in {"period": 2, "stagger": True}.items() if key in fields}


Kind = Literal["noise", "zero", "rank-1"]


@dataclass(frozen=True)
class Case:
    """A run of the toy: ``optimizer`` on its matrices, or on everything if it is elementwise.

    poison: between the steps there are two whose gradient is not finite, on the last DP rank alone.
    """

    optimizer: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    strategy: str = "canzona"
    nv_version: str = "lpt-ns"
    specs: tuple[ParamSpec, ...] = MIXED
    kind: Kind = "noise"
    steps: int = 3
    microbatches: int = 1
    dtype: str = "float32"
    split: Literal["none", "update", "atoms"] = "none"
    offload: bool = False
    poison: bool = False

    def __str__(self) -> str:
        system = f"{self.strategy} {self.nv_version} split={self.split} offload={self.offload}"
        what = f"{self.kind} {len(self.specs)} x{self.microbatches} {self.dtype} poison={self.poison}"
        return f"{self.optimizer} {dict(self.settings)} {system} {what}"

    def optimizers(self) -> dict[str, Optimizer]:
        return {"adamw": create("adamw"), self.optimizer: create(self.optimizer, dict(self.settings))}

    def routed(self) -> dict[str, Optimizer]:
        of = self.optimizers()
        main, other = of[self.optimizer], of["adamw"]
        return {s.name: main if not main.atomic or is_matrix(s) else other for s in self.specs}

    def gradient(self, dp_rank: int, step: int, micro: int) -> dict[str, Tensor]:
        """Of one microbatch on one DP rank, before it is divided by the number of microbatches."""
        if self.kind == "zero":
            return {s.name: torch.zeros(s.shape) for s in self.specs}
        noise = random_tensors(self.specs, 7, dp_rank, step, micro)
        if self.kind == "noise":
            return noise
        return {name: torch.outer(g[:, 0], g[0]) if g.ndim == 2 else g for name, g in noise.items()}

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def cases() -> list[Case]:
    """Every optimizer under every system; each awkward case under one system, another one for each optimizer."""
    out: list[Case] = []
    variants = [(name, settings_of(name)) for name in sorted(registry())]
    variants += [(name, settings_of(name) | more) for name, options in MORE.items() for more in options]
    for number, (name, settings) in enumerate(variants):
        out += [Case(name, settings, strategy, version, steps=4) for strategy, version in SYSTEMS]
        awkward: list[dict[str, Any]] = [
            {"kind": "zero"},
            {"kind": "rank-1"},
            {"specs": FEW},
            {"microbatches": 4, "steps": 2},
            {"dtype": "bfloat16"},
            {"specs": SPLIT, "split": "update", "offload": True},
            {"specs": SPLIT, "split": "atoms", "poison": True},
        ]
        for place, changes in enumerate(awkward):
            strategy, version = SYSTEMS[(number + place) % len(SYSTEMS)]
            out.append(Case(name, settings, strategy, version, **changes))
    return out


def run_cases(rank: int, world: int, dp: int, tp: int, todo: list[Case]) -> list[dict[str, Tensor]]:
    mesh = Mesh.create(dp, tp, torch.device("cpu"))
    return [run_case(mesh, case) for case in todo]


def run_case(mesh: Mesh, case: Case) -> dict[str, Tensor]:
    """Return this rank's parameters, masters and states after the last step, by names as in the engine's state."""
    model = Toy(random_tensors(case.specs, 1), case.specs, mesh.tp, mesh.tp_rank, case.torch_dtype)
    planning = PlanOptions(bucket_elements=100, nv_version=case.nv_version, fallback=False, split=case.split)  # type: ignore[arg-type]
    plan = make_plan(case.strategy, case.specs, list(case.routed().values()), mesh.dp, mesh.tp, planning)
    engine = Engine(model, plan, case.optimizers(), mesh, dataclasses.replace(OPTIONS, offload=case.offload))
    for step in range(case.steps):
        if case.poison:
            skip_two(model, engine, case, step)
        for micro in range(case.microbatches):
            loss = model.loss(case.gradient(mesh.dp_rank, step, micro)) / case.microbatches
            with engine.microbatch(last=micro == case.microbatches - 1):
                loss.backward()
        info = engine.step(LR * (1 + step))
        assert not info.skipped, case
    return contents(model, engine)


def contents(model: Toy, engine: Engine) -> dict[str, Tensor]:
    engine.synchronize()
    out = {f"parameter/{name}": tensor for name, tensor in model.local().items()}
    return out | {name: tensor.clone() for name, tensor in engine.state_dict().items() if name != "skips"}


def skip_two(model: Toy, engine: Engine, case: Case, step: int) -> None:
    """Two steps with a gradient that is not finite: nothing at all changes, and each rank learns the name."""
    before = contents(model, engine)
    for name, value in (("b_odd.weight", float("nan")), ("a_norm.weight", float("inf"))):
        gradient = case.gradient(engine.mesh.dp_rank, step, 7)
        if engine.mesh.dp_rank == engine.mesh.dp - 1:
            gradient[name].view(-1)[3] = value
        with engine.microbatch(last=True):
            model.loss(gradient).backward()
        info = engine.step(LR)
        assert info.not_finite == (name,), (str(case), info)
        after = contents(model, engine)
        changed = [key for key, tensor in before.items() if not torch.equal(tensor, after[key])]
        assert not changed, (str(case), changed)


def reference(case: Case, dp: int, tp: int) -> Reference:
    """The same run in one process, on whole tensors; what passes through parameters of ``dtype`` is rounded to it."""

    def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.to(case.torch_dtype).float() for name, tensor in tensors.items()}

    twin = Reference(rounded(random_tensors(case.specs, 1)), case.specs, case.routed(), OPTIONS, tp)
    index = 0  # of the matrix, whichever parameter it is part of
    for spec in case.specs:
        for state in twin.states[spec.name]:
            twin.optimizers[spec.name].place(state, index)
            index += 1
    for step in range(case.steps):
        per_rank = []
        for rank in range(dp):
            parts = [rounded(case.gradient(rank, step, micro)) for micro in range(case.microbatches)]
            total = {name: g / case.microbatches for name, g in parts[0].items()}
            for part in parts[1:]:
                total = {name: g + part[name] / case.microbatches for name, g in total.items()}
            per_rank.append(total)
        twin.step(per_rank, LR * (1 + step))
    return twin


def differences(case: Case, twin: Reference, dp: int, tp: int, results: list[dict[str, Tensor]]) -> list[str]:
    """What is not bit for bit the twin's, and what nobody owns."""
    out: list[str] = []
    for spec in case.specs:
        atomic = twin.optimizers[spec.name].atomic
        unowned = set(state_names(spec)) if atomic else set()
        for rank, result in enumerate(results):
            mine = shard(twin.parameters[spec.name], spec, tp, rank % tp)
            compared = {f"parameter/{spec.name}": mine.to(case.torch_dtype)}
            compared |= {key: tensor for key, tensor in masters(spec, twin, tp, rank % tp) if key in result}
            for name, state in zip(state_names(spec), twin.states[spec.name], strict=True) if atomic else ():
                held = {f"state/{name}/{key}": tensor for key, tensor in state.items()}
                if held.keys() <= result.keys():
                    unowned.discard(name)
                    compared |= held
            out += [
                f"{case}: rank {rank} of {dp} x {tp}: {key} is off by up to {_largest(result[key], want)}"
                for key, want in compared.items()
                if not torch.equal(result[key].reshape(want.shape), want)
            ]
        out += [f"{case}: no rank of {dp} x {tp} has a state of {name}" for name in sorted(unowned)]
    return out


def masters(spec: ParamSpec, twin: Reference, tp: int, tp_rank: int) -> Iterator[tuple[str, Tensor]]:
    """The master of a parameter, and of blocks of it that a plan may own apart."""
    whole = twin.parameters[spec.name]
    yield f"master/{spec.name}", shard(whole, spec, tp, tp_rank)
    for part in spec.in_blocks():
        if part.part_of is not None:
            rows = whole[part.first : part.first + part.shape[0]]
            yield f"master/{part.name}", shard(rows, part, tp, tp_rank)


def _largest(a: Tensor, b: Tensor) -> float:
    return float((a.reshape(b.shape).double() - b.double()).abs().max())


@pytest.mark.parametrize(("dp", "tp"), MESHES)
def test_equals_one_process_bitwise(dp: int, tp: int) -> None:
    todo = cases()
    results = run_ranks(run_cases, dp * tp, dp, tp, todo, timeout=280)
    twins: dict[str, Reference] = {}  # one for all strategies
    wrong: list[str] = []
    for number, case in enumerate(todo):
        same = dataclasses.replace(case, strategy="", nv_version="", split="none", offload=False, poison=False)
        key = repr(same)
        if key not in twins:
            twins[key] = reference(case, dp, tp)
        wrong += differences(case, twins[key], dp, tp, [result[number] for result in results])
    assert not wrong, "\n".join([f"{len(wrong)} differences", *wrong[:20]])


@pytest.mark.parametrize("name", registry())
def test_zero_gradients_leave_nothing_but_decay(name: str) -> None:
    """What the reference, and so every layout, makes of them."""
    twin = reference(Case(name, settings_of(name), kind="zero"), 2, 1)
    for spec in MIXED:
        expected = random_tensors(MIXED, 1)[spec.name]
        for step in range(3):
            expected = expected * (1.0 - LR * (1 + step) * DECAY)
        assert torch.equal(twin.parameters[spec.name], expected), spec.name


@pytest.mark.parametrize("name", [name for name in registry() if "period" in registry()[name].Hyper.model_fields])
def test_the_steps_include_refreshes_that_matter(name: str) -> None:
    """Negative control: with a longer period the same steps end elsewhere."""
    here, later = (
        reference(Case(name, settings_of(name) | {"period": period}, steps=4), 2, 1).parameters for period in (2, 5)
    )
    assert not torch.equal(here["b_square.weight"], later["b_square.weight"])


def test_a_single_wrong_bit_is_seen() -> None:
    """Negative control of the comparison itself: a parameter, a master, a state, a state that is missing."""
    case = Case("soap", settings_of("soap"))
    twin = reference(case, 1, 1)
    result = {f"parameter/{name}": tensor.clone() for name, tensor in twin.parameters.items()}
    result |= {f"master/{name}": tensor.clone() for name, tensor in twin.parameters.items()}
    result |= {f"state/{n}/{key}": t.clone() for n, states in twin.states.items() for key, t in states[0].items()}
    assert differences(case, twin, 1, 1, [result]) == []
    for key in ("parameter/a_norm.weight", "master/b_odd.weight", "state/a_fc1.weight/second"):
        wrong = {name: tensor.clone() for name, tensor in result.items()}
        first = wrong[key].view(-1)
        first[0] = torch.nextafter(first[0], first[0] + 1)
        assert len(differences(case, twin, 1, 1, [wrong])) == 1, key
    del result["state/b_row.weight/momentum"]
    assert "no rank" in differences(case, twin, 1, 1, [result])[0]
