"""Asynchronous Nesterov (Ajanthan et al., 2025): NAdam with a beta1 of 0.99 everywhere."""

from __future__ import annotations

from typing import cast

from pydantic import Field

from impl.optimizers.base import Optimizer, create
from impl.rotation.method import StageContext, method
from impl.rotation.methods.common import Beta, StageHyper, StageMethod


class NesterovHyper(StageHyper):
    """Settings of the Nesterov method: those of NAdam."""

    beta1: Beta = 0.99
    beta2: Beta = 0.99
    eps: float = Field(default=1e-8, gt=0.0)


@method("nesterov", "Nesterov (NAdam)")
class Nesterov(StageMethod):
    """NAdam for all parameters: its step looks ahead along the momentum, which makes up for some of the delay."""

    Hyper = NesterovHyper

    def matrix_optimizer(self, context: StageContext) -> Optimizer:
        """Return NAdam."""
        hyper = cast(NesterovHyper, self.hyper)
        return create("nadam", {"betas": (hyper.beta1, hyper.beta2), "eps": hyper.eps})

    def elementwise_optimizer(self, context: StageContext) -> Optimizer:
        """Return NAdam."""
        return self.matrix_optimizer(context)
