"""PipeMare (Yang et al., MLSys 2021): no stash; discounted learning rates (T1) and corrected backward weights (T2)."""

from __future__ import annotations

from typing import Any, cast

from pydantic import Field
from torch import Tensor

from impl.rotation.method import StageContext, method
from impl.rotation.methods.common import AdamWMethod, AdamWStageHyper, discount


class PipeMareHyper(AdamWStageHyper):
    """Settings of PipeMare.

    fraction: of the run, over which the discount (T1) fades.
    correct: whether backward weights are corrected (T2).
    decay: ``D``, what is left of an update in the running mean of updates when the delay is over.
    """

    fraction: float = Field(default=0.25, gt=0.0, le=1.0)
    correct: bool = True
    decay: float = Field(default=0.135, gt=0.0, lt=1.0)


@method("pipemare", "PipeMare")
class PipeMare(AdamWMethod):
    """T1 and T2 of PipeMare on the schedule of this package.

    T1: ``lr / tau_fwd^p`` with PipeMare's own ``tau_fwd = (2 (P - 1 - k) + 1) / N`` of 0-based stage ``k``, N
    microbatches an update; where that is below 1, the rate is raised.
    T2: backward runs on ``u = W[t] - tau d``; ``d <- g d + (1 - g) (W[t] - W[t-1])``, ``g = D^(1 / tau)``, where tau is
    the delay between forward and backward that the schedule really has.
    """

    Hyper = PipeMareHyper
    modes = ("no-stash-recompute",)

    @property
    def _pipemare(self) -> PipeMareHyper:
        return cast(PipeMareHyper, self.hyper)

    def lr(self, lr: float, update: int, context: StageContext) -> float:
        """Return the learning rate of ``update``, discounted by the fractional delay of the forward."""
        delay = (2 * (context.stages - 1 - context.stage) + 1) / context.per_update
        return discount(super().lr(lr, update, context), delay, update, self._pipemare.fraction * context.updates)

    def backward_weights(self, newest: Tensor, memory: dict[str, Any], context: StageContext) -> Tensor | None:
        """Return ``newest - tau d``; None on a stage without delay, or before the first update."""
        tau = context.staleness
        if tau < 1 or not self._pipemare.correct:
            return None
        step = memory.pop("update", None)  # taken once: a second backward before the next update adds nothing
        if step is not None:
            keep = self._pipemare.decay ** (1 / tau)
            mean = memory.get("mean")
            memory["mean"] = step * (1 - keep) if mean is None else mean.mul_(keep).add_(step, alpha=1 - keep)
        if "mean" not in memory:
            return None
        return newest.sub(memory["mean"], alpha=tau)
