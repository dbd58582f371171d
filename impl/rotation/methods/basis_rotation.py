"""Basis rotation under delay (Jung, Shin, Lee, arXiv 2602.03515) and its variants, as settings of one method."""

from __future__ import annotations

from typing import Literal, cast

from pydantic import Field

from impl.errors import ConfigError
from impl.optimizers.base import Optimizer, create
from impl.rotation.method import StageContext, method
from impl.rotation.methods.common import Beta, StageHyper, StageMethod
from impl.rotation.methods.periods import periods


class RotationStageHyper(StageHyper):
    """Settings of basis rotation on a pipeline.

    allocation: of refreshes over stages: ``uniform``, every ``period`` updates everywhere; ``stage-aware``, as many
        altogether, but more often where gradients are staler; ``reversed``, the same turned round, a control.
    max_period: of any stage, with ``stage-aware`` and ``reversed``.
    beta1, beta2: of rotated matrices; everything else uses AdamW with 0.9 and 0.99.
    stagger: matrices take turns in refreshing.  gain: factor of the learning rate of rotated matrices.

    The rest is explained in :class:`impl.optimizers.basis_rotation.BasisRotationHyper`.
    """

    source: Literal["1st", "2nd"] = "2nd"
    geometry: Literal["bilateral", "unilateral"] = "bilateral"
    period: int = Field(default=10, ge=1)
    allocation: Literal["uniform", "stage-aware", "reversed"] = "uniform"
    max_period: int = Field(default=100, ge=1)
    stagger: bool = False
    nesterov: bool = False
    gain: float = Field(default=1.0, gt=0.0)
    beta1: Beta = 0.9
    beta2: Beta = 0.99
    shampoo_beta: Beta | None = None
    eps: float = Field(default=1e-8, gt=0.0)
    basis_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    max_side: int = Field(default=10000, ge=1)
    beyond: Literal["unrotated", "blocks"] = "unrotated"


_PASSED_ON = {
    *("source", "geometry", "stagger", "nesterov", "gain", "shampoo_beta", "eps", "basis_dtype", "max_side", "beyond")
}


@method("basis-rotation", "Basis rotation")
class BasisRotationMethod(StageMethod):
    """Adam in an estimated eigenbasis for matrices, AdamW for everything else."""

    Hyper = RotationStageHyper

    @property
    def settings(self) -> RotationStageHyper:
        """The settings, typed."""
        return cast(RotationStageHyper, self.hyper)

    def check(self, context: StageContext) -> None:
        """Raise :class:`ConfigError` if the settings make no sense on this stage."""
        super().check(context)
        self.period(context)

    def period(self, context: StageContext) -> int:
        """Return how many updates of this stage pass between two refreshes of its bases."""
        hyper = self.settings
        if hyper.allocation == "uniform":
            return hyper.period
        if not context.profile:
            raise ConfigError(f"allocation {hyper.allocation} needs the staleness of every stage: use uniform")
        reverse = hyper.allocation == "reversed"
        return periods(context.profile, hyper.period, hyper.max_period, reverse=reverse)[context.stage]

    def matrix_optimizer(self, context: StageContext) -> Optimizer:
        """Return basis rotation with this stage's period."""
        hyper = self.settings
        own = {"period": self.period(context), "betas": (hyper.beta1, hyper.beta2)}
        return create("basis-rotation", {**hyper.model_dump(include=_PASSED_ON), **own})
