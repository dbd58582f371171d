"""SOAP (Vyas et al., 2024) under delay: basis rotation's nearest relative."""

from __future__ import annotations

from typing import cast

from pydantic import Field

from impl.optimizers.base import Optimizer, create
from impl.rotation.method import StageContext, method
from impl.rotation.methods.common import Beta, StageHyper, StageMethod


class SoapStageHyper(StageHyper):
    """Settings of SOAP (see :class:`impl.optimizers.soap.SoapHyper`)."""

    beta1: Beta = 0.95
    beta2: Beta = 0.95
    shampoo_beta: Beta | None = None
    eps: float = Field(default=1e-8, gt=0.0)
    period: int = Field(default=10, ge=1)
    max_side: int = Field(default=10000, ge=1)


@method("soap", "SOAP")
class SoapPipeline(StageMethod):
    """SOAP for matrices, AdamW for everything else."""

    Hyper = SoapStageHyper

    def matrix_optimizer(self, context: StageContext) -> Optimizer:
        """Return SOAP."""
        hyper = cast(SoapStageHyper, self.hyper)
        same = hyper.model_dump(include={"shampoo_beta", "eps", "period", "max_side"})
        return create("soap", {**same, "betas": (hyper.beta1, hyper.beta2)})
