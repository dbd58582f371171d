"""Delay compensation (DC-ASGD; Zheng et al., ICML 2017): a first-order correction of the stale gradient."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from impl.rotation.method import method
from impl.rotation.methods.common import AdamWMethod, AdamWStageHyper


class DelayCompensationHyper(AdamWStageHyper):
    """Settings of delay compensation.

    variant: ``constant`` (DC-ASGD-c) or ``adaptive`` (DC-ASGD-a).
    strength: lambda of ``constant``; lambda0 of ``adaptive``.
    decay: of the running mean of squares of ``adaptive``; floor: added to it under the root.
    """

    variant: Literal["constant", "adaptive"] = "adaptive"
    strength: float = Field(default=2.0, ge=0.0)
    decay: float = Field(default=0.95, ge=0.0, lt=1.0)
    floor: float = Field(default=1e-7, gt=0.0)


@method("delay-compensation", "Delay compensation")
class DelayCompensation(AdamWMethod):
    """``g + lambda g g (W_newest - W_stale)`` in place of ``g``, all element by element.

    The squared gradient stands for the Hessian's diagonal.  ``adaptive``: ``lambda = lambda0 / sqrt(ms + floor)`` with
    ``ms <- decay ms + (1 - decay) g g``, the present gradient included.
    """

    Hyper = DelayCompensationHyper
    modes = ("stash", "2bw", "vertical-sync")

    @torch.no_grad()
    def correct(self, gradient: Tensor, newest: Tensor, stale: Tensor, memory: dict[str, Any]) -> None:
        """Add the correction to ``gradient`` in place."""
        hyper = cast(DelayCompensationHyper, self.hyper)
        square = gradient * gradient
        change = square * (newest - stale) * hyper.strength
        if hyper.variant == "adaptive":
            mean = memory.get("mean_square")
            mean = torch.zeros_like(square) if mean is None else mean
            memory["mean_square"] = mean.mul_(hyper.decay).add_(square, alpha=1 - hyper.decay)
            change /= (mean + hyper.floor).sqrt()
        gradient.add_(change)
