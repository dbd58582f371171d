"""What a stage is made of: its options, its engine, and which graphs it keeps from forward to backward."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.mesh import Mesh
from impl.canzona.strategies import make_plan
from impl.errors import ConfigError
from impl.models import gpt
from impl.optimizers.base import Optimizer
from impl.optimizers.routing import is_matrix
from impl.rotation.method import Method, StageContext
from impl.rotation.schedule import Schedule


@dataclass(frozen=True)
class StageOptions:
    """Settings of a stage that neither schedule nor method decide.

    recompute: what a backward computes again instead of keeping it: ``none``; ``stage``, everything but the stage's
        input; ``selective-attention``, the core attention.
    stash_on_cpu: keep stashed weights in CPU memory; with ``recompute: stage`` only.
    clip: limit of the gradient norm of this stage, 0 for none: a stage knows no other's gradients in time.
    strategy, reduction: how the stage's DP replicas share the step (see :mod:`impl.canzona`).
    """

    recompute: Literal["none", "stage", "selective-attention"] = "none"
    stash_on_cpu: bool = False
    clip: float = 1.0
    weight_decay: float = 0.01
    strategy: str = "canzona"
    reduction: Literal["native", "rank-order"] = "native"

    def check(self) -> None:
        """Raise :class:`ConfigError` if the settings contradict each other."""
        if self.stash_on_cpu and self.recompute != "stage":
            raise ConfigError(
                f"stash_on_cpu needs recompute=stage: with recompute={self.recompute} the kept graphs hold the weights"
            )


def overrides(method: Method, hook: str) -> bool:
    """Return whether ``method`` has a ``hook`` of its own."""
    return getattr(type(method), hook) is not getattr(Method, hook)


def kept_graphs(schedule: Schedule, index: int, method: Method, options: StageOptions) -> tuple[set[int], set[int]]:
    """Return the microbatches whose graph is kept from forward to backward, and which of these span an update.

    A graph is of use only if the backward runs on the same weights; with ``recompute: stage`` it is kept where the
    backward comes next, so that nothing would be saved.
    """
    actions = schedule.actions[index]
    corrected = schedule.mode == "no-stash-recompute" and overrides(method, "backward_weights")
    place = {(action.kind, action.number): i for i, action in enumerate(actions)}
    kept, outlives = set(), set()
    updates = [0, *accumulate(action.kind == "U" for action in actions)]
    for (kind, number), forward in place.items():
        if kind != "F":
            continue
        backward = place["B", number]
        same = actions[forward].version == actions[backward].version and not corrected
        if same and (options.recompute != "stage" or backward == forward + 1):
            kept.add(number)
            if updates[backward] != updates[forward]:
                outlives.add(number)
    return kept, outlives


def build_engine(
    model: gpt.PortableGPT, method: Method, context: StageContext, mesh: Mesh, options: StageOptions
) -> Engine:
    """Return the engine that updates ``model`` with the optimizers of ``method``."""
    matrix, elementwise = method.matrix_optimizer(context), method.elementwise_optimizer(context)
    if matrix.name == elementwise.name and matrix.hyper != elementwise.hyper:
        raise ConfigError(f"{method.name} uses {matrix.name} twice with different settings, which one plan cannot hold")
    parameters = model.catalogued.parameters(mesh.tp, model.part)
    costs = [matrix if is_matrix(parameter) else elementwise for parameter in parameters]
    plan = make_plan(options.strategy, parameters, costs, mesh.dp, mesh.tp)
    optimizers: dict[str, Optimizer] = {rule.name: rule for rule in (matrix, elementwise)}
    settings = EngineOptions(reduction=options.reduction, clip=options.clip, weight_decay=options.weight_decay)
    return Engine(model, plan, optimizers, mesh, settings)
