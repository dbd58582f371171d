"""Weight prediction (SpecTrain, XPipe, PipeOptim): compute at the weights that the gradient will be applied to."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from impl.rotation.method import StageContext, method
from impl.rotation.methods.common import AdamWMethod


@method("weight-prediction", "Weight prediction")
class WeightPrediction(AdamWMethod):
    """Forward and backward at ``W[t] - lr tau d``, where ``d`` is the direction of the last update.

    ``lr d`` is taken as the last step itself, ``W[t-1] - W[t]``, its weight decay and learning rate included.
    """

    modes = ("stash", "2bw", "vertical-sync")

    def predict(self, newest: Tensor, memory: dict[str, Any], context: StageContext, lr: float) -> Tensor | None:
        """Return ``newest`` plus ``tau`` times the last step; None without staleness or before the first update."""
        step = memory.get("update")
        if step is None or context.staleness < 1:
            return None
        return newest.add(step, alpha=context.staleness)
