"""PipeDream-LR: PipeDream with PipeMare's learning-rate discount, as in the code of basis rotation's authors."""

from __future__ import annotations

from typing import cast

from pydantic import Field

from impl.rotation.method import StageContext, method
from impl.rotation.methods.common import AdamWMethod, AdamWStageHyper, discount


class PipeDreamLRHyper(AdamWStageHyper):
    """Settings of PipeDream-LR.

    fraction: of the run, over which the discount fades (the authors: 7 of 250 epochs; here the whole run, which was
        better in short ones).
    """

    fraction: float = Field(default=1.0, gt=0.0, le=1.0)


@method("pipedream-lr", "PipeDream-LR")
class PipeDreamLR(AdamWMethod):
    """``lr / tau^p`` with ``p = 1 - min(s / K, 1)``, on stages with a staleness tau of at least 1.

    ``tau`` is in updates, ``s`` the 1-based update and ``K`` a fraction of the run.
    """

    Hyper = PipeDreamLRHyper

    def lr(self, lr: float, update: int, context: StageContext) -> float:
        """Return the discounted learning rate of ``update``."""
        lr = super().lr(lr, update, context)
        if context.staleness < 1:
            return lr
        fraction = cast(PipeDreamLRHyper, self.hyper).fraction
        return discount(lr, context.staleness, update, fraction * context.updates)
