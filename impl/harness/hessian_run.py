"""Train, then measure the Hessian in single matrices: unrotated, in the optimizer's bases, in random ones."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from impl.canzona.mesh import Mesh
from impl.harness import launch
from impl.harness.hessian_spec import HessianRun, Probes
from impl.harness.pipeline_run import one_process, open_replica, prepare, stage_options
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.progress import Progress
from impl.harness.record import RunFolder, append_row, read_rows, write_atomically
from impl.harness.schedule import learning_rate
from impl.models import gpt
from impl.rotation import hessian
from impl.rotation.simulator import Simulation, build_stages, simulate
from impl.rotation.stage import Stage

ROLES = {"linear_qkv": "attention", "linear_proj": "attention", "linear_fc1": "MLP", "linear_fc2": "MLP"}
"""The matrices of a layer, and what they belong to."""
BASES = ("before", "after", "random")
"""Unrotated; in the bases of the optimizer; in random orthogonal bases of the same sides, a control."""
PER_BASIS = {"entry_sum": "nats", "normalised": "1"}
"""Quantities that depend on the basis, with units."""
INVARIANT = {"frobenius": "nats", "largest_eigenvalue": "nats", "eigen_residual": "1", "step_error": "1"}
"""Quantities that do not, or that say how far the numbers can be trusted."""
Bases = tuple[Tensor | None, Tensor | None]
Number = dict[str, Any]


class Place(NamedTuple):
    """One matrix of a layer."""

    layer: int
    role: str

    @property
    def group(self) -> str:
        """``attention`` or ``MLP``."""
        return ROLES[self.role]

    @property
    def name(self) -> str:
        """Megatron's qualified name."""
        inner = "self_attention" if self.group == "attention" else "mlp"
        return f"decoder.layers.{self.layer}.{inner}.{self.role}.weight"


@dataclass(frozen=True)
class Moment:
    """A training that has ended, in float64.

    bases: of each matrix, ``U`` and ``V``, None for a side that is not rotated.
    tokens: ``[b, s + 1]``, of the loss whose Hessian is measured.
    """

    model: gpt.PortableGPT
    bases: Mapping[str, Bases]
    tokens: Tensor


def places(run: HessianRun) -> list[Place]:
    """Return the matrices that ``run`` measures."""
    return [Place(layer, role) for layer in run.layers for role in ROLES]


def loss(model: gpt.PortableGPT, tokens: Tensor) -> Tensor:
    """Return the mean cross-entropy of ``tokens`` in the type of ``model``; the training's own is fp32 whatever it is.

    For one tensor-parallel rank.
    """
    logits = model(input_ids=tokens[:, :-1], position_ids=None, attention_mask=None)
    vocabulary = model.catalogued.arch.vocab_size
    return functional.cross_entropy(logits[..., :vocabulary].flatten(0, 1), tokens[:, 1:].flatten())


def block_gradient(model: gpt.PortableGPT, name: str, tokens: Tensor) -> hessian.Gradient:
    """Return the gradient in the matrix ``name`` as a function of it, on the CPU; all other weights are those of now.

    The model's weights are changed by each call.
    """
    parameter = dict(model.named_parameters())[name]

    def gradient(weights: Tensor) -> Tensor:
        with torch.no_grad():
            parameter.copy_(weights)
        parameter.requires_grad_(True)
        (found,) = torch.autograd.grad(loss(model, tokens), parameter)
        parameter.requires_grad_(False)
        return found.cpu()

    return gradient


def measure(gradient: hessian.Gradient, at: Tensor, bases: Bases, probes: Probes, key: str) -> Iterator[Number]:
    """Yield the numbers of one matrix with weights ``at`` (float64, on the CPU).

    key: what the random numbers depend on.  The bases share their Cauchy probes.
    """

    def generator(what: str) -> torch.Generator:
        drawn = hashlib.sha256(f"{key} {what}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(drawn[:8], "little", signed=True))

    shape, product = tuple(at.shape), hessian.difference_product(gradient, at)
    frobenius = hessian.frobenius_norm(product, shape, probes.normal, generator("normal"))
    yield number("frobenius", frobenius.value, frobenius.error)
    chance = generator("bases")
    random = tuple(None if b is None else hessian.random_orthogonal(len(b), chance) for b in bases)
    for basis, (left, right) in zip(BASES, ((None, None), bases, random), strict=True):
        turned = hessian.rotated(product, left, right)
        total = hessian.entry_sum(turned, shape, probes.cauchy, generator("cauchy"))
        yield number("entry_sum", total.value, total.error, basis)
        share = hessian.normalised(total.value, frobenius.value, at.numel())
        relative = math.hypot(*(m.error / m.value if m.value else math.nan for m in (total, frobenius)))
        yield number("normalised", share, share * relative, basis)
    largest = hessian.largest_eigenvalue(product, shape, probes.iterations, generator("eigenvalue"))
    yield number("largest_eigenvalue", abs(largest.value))
    yield number("eigen_residual", largest.residual)
    yield number("step_error", hessian.step_error(gradient, at, generator("step")))


def bases_of(state: Mapping[str, Tensor], name: str) -> Bases:
    """Return ``U`` and ``V`` of the matrix ``name`` from an engine's state, float64 on the CPU."""

    def side(which: str) -> Tensor | None:
        prefix = f"state/{name}/basis.{which}."
        starts = sorted(int(key.removeprefix(prefix)) for key in state if key.startswith(prefix))
        return torch.block_diag(*(state[f"{prefix}{start}"].double().cpu() for start in starts)) if starts else None

    return side("left"), side("right")


def execute(run: HessianRun, out: Path) -> int:
    """Measure ``run`` in the folder ``out``, which then holds its record; return the exit code.

    Matrices that an interrupted start has measured are not measured again.
    """

    def work(folder: RunFolder) -> None:
        found = _measure_seeds(run, folder.metrics)
        status = "diverged" if any(row["diverged"] for row in found) else "done"
        folder.finish(run, status, result={"trainings": found})

    return launch.execute_here(work, run, out)


def _measure_seeds(run: HessianRun, metrics: Path) -> list[dict[str, Any]]:
    """Train every seed of which something is missing, measure that, and return a row for each training."""
    rows = read_rows(metrics)
    write_atomically(metrics, "".join(json.dumps(row) + "\n" for row in rows))  # without a line that was cut short
    trained = {row["seed"]: row for row in rows if row["event"] == "training"}
    have = {(row["seed"], row["matrix"]) for row in rows if row["event"] == "hessian"}
    progress = Progress(sys.stdout, len(run.seeds) * len(places(run)), run.training.process.heartbeat_s, "matrix")
    done = len(have)
    for seed in run.seeds:
        left = [place for place in places(run) if (seed, place.name) not in have]
        if not left or trained.get(seed, {"diverged": False})["diverged"]:
            continue
        spec = run.of_seed(seed)
        with one_process(spec) as device:
            row, moment = _train(spec, device, run.probes.sequences)
            if seed not in trained:
                append_row(metrics, row)
                trained[seed] = row
            for place in left if moment else ():
                assert moment is not None
                append_row(metrics, {"event": "hessian", "seed": seed, **_measured(moment, place, run.probes, seed)})
                done += 1
                progress.advance(done, f"seed {seed}, {place.name}  ")
    return [trained[seed] for seed in run.seeds]


def _measured(moment: Moment, place: Place, probes: Probes, seed: int) -> dict[str, Any]:
    parameter = dict(moment.model.named_parameters())[place.name]
    at = parameter.detach().cpu().clone()
    gradient = block_gradient(moment.model, place.name, moment.tokens)
    numbers = list(measure(gradient, at, moment.bases[place.name], probes, f"{seed} {place.name}"))
    with torch.no_grad():
        parameter.copy_(at)
    return {"matrix": place.name, "shape": list(at.shape), "numbers": numbers}


def _train(spec: PipelineSpec, device: torch.device, sequences: int) -> tuple[dict[str, Any], Moment | None]:
    """Train ``spec``; return the row of the training, and weights and bases unless it diverged."""
    setup = prepare(spec)
    mesh = Mesh.create(1, 1, device)
    rate: Callable[[int], float] = lambda update: learning_rate(spec.schedule, spec.lr, update, spec.steps)  # noqa: E731
    options = stage_options(spec)
    stages = build_stages(
        setup.model, setup.parts, setup.schedule, setup.method, mesh, rate, seed=spec.seed, options=options
    )
    found = simulate(stages, setup.schedule, open_replica(spec, setup, 0))
    row = _training_row(spec, found)
    if found.diverged:
        return row, None
    model = gpt.build_model(setup.model, mesh.tp_group, dtype=torch.float64, device=device)
    bases = _take_over(stages, model)
    batch = spec.model_copy(update={"batch": sequences})
    tokens = open_replica(batch, setup, 0).batch(spec.steps + 1).to(device)
    return row, Moment(model, bases, tokens)


def _training_row(spec: PipelineSpec, found: Simulation) -> dict[str, Any]:
    return {
        "event": "training",
        "seed": spec.seed,
        "diverged": found.diverged,
        "final_loss": found.losses[-1],
        "params_digest": found.params_digest,
    }


@torch.no_grad()
def _take_over(stages: list[Stage], model: gpt.PortableGPT) -> dict[str, Bases]:
    """Copy the newest weights of ``stages`` into ``model``, which needs no gradients then; return their bases."""
    own = dict(model.named_parameters())
    bases: dict[str, Bases] = {}
    for stage in stages:
        stage.bind_newest()
        state = stage.engine.state_dict()
        for name, parameter in stage.model.named_parameters():
            own[name].copy_(parameter)
            bases[name] = bases_of(state, name)
    model.requires_grad_(False)
    return bases


def number(quantity: str, value: float, error: float = math.nan, basis: str | None = None) -> Number:
    """Return one number of a matrix as plain data."""
    unit = (PER_BASIS | INVARIANT)[quantity]
    return {"basis": basis, "quantity": quantity, "value": value, "standard_error": error, "unit": unit}
