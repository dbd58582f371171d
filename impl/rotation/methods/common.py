"""What pipeline methods share: AdamW for a stage, and learning-rate and momentum rules that depend on staleness."""

from __future__ import annotations

import math
from typing import Annotated, Literal, cast

from pydantic import ConfigDict, Field

from impl.errors import ConfigError
from impl.optimizers.base import HyperParameters, Optimizer, create
from impl.rotation.method import Method, StageContext

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class StageHyper(HyperParameters):
    """Settings of every method.

    lr_slope: the learning rate of a stage with staleness tau is multiplied by ``1 - lr_slope tau``; refused where that
        is not positive.  0 (default) changes nothing.  An article about basis rotation has 0.03, its authors do not.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    lr_slope: float = Field(default=0.0, ge=0.0)


class AdamWStageHyper(StageHyper):
    """Settings of a method with AdamW everywhere.

    beta1_rule: ``constant``, or ``article``: ``0.9 + 0.1 exp(-tau / 20)`` on a stage with staleness tau instead of
        ``beta1``; refused on a stage without staleness, where it is 1 and the update 0/0.
    """

    beta1: Beta = 0.9
    beta2: Beta = 0.99
    eps: float = Field(default=1e-8, gt=0.0)
    beta1_rule: Literal["constant", "article"] = "constant"


class StageMethod(Method):
    """A method whose elementwise parameters use AdamW with betas 0.9 and 0.99."""

    Hyper = StageHyper

    def check(self, context: StageContext) -> None:
        """Raise :class:`ConfigError` if ``lr_slope`` leaves no positive learning rate on this stage."""
        if linear_factor(self._lr_slope, context.staleness) <= 0:
            slope, tau = self._lr_slope, context.staleness
            raise ConfigError(
                f"{self.name}: lr_slope {slope:g} gives stage {context.stage} with staleness {tau} a learning-rate "
                f"factor of {linear_factor(slope, tau):.3g}: use a slope below {1 / tau:.3g} or fewer stages"
            )

    def lr(self, lr: float, update: int, context: StageContext) -> float:
        """Return ``lr (1 - lr_slope tau)``."""
        return lr * linear_factor(self._lr_slope, context.staleness)

    @property
    def _lr_slope(self) -> float:
        return cast(StageHyper, self.hyper).lr_slope


class AdamWMethod(StageMethod):
    """A method with AdamW for all parameters."""

    Hyper = AdamWStageHyper

    @property
    def settings(self) -> AdamWStageHyper:
        """The settings, typed."""
        return cast(AdamWStageHyper, self.hyper)

    def check(self, context: StageContext) -> None:
        """Raise :class:`ConfigError` if a rule leaves this stage without a learning rate, or with a beta1 of 1."""
        super().check(context)
        if self.beta1(context) >= 1.0:
            raise ConfigError(
                f"{self.name}: beta1_rule article is 1 on stage {context.stage}, which has no staleness, and the "
                "update would be 0/0: use beta1_rule constant"
            )

    def beta1(self, context: StageContext) -> float:
        """Return the decay of the first moment on this stage."""
        if self.settings.beta1_rule == "article":
            return article_beta1(context.staleness)
        return self.settings.beta1

    def matrix_optimizer(self, context: StageContext) -> Optimizer:
        """Return AdamW."""
        return create("adamw", {"betas": (self.beta1(context), self.settings.beta2), "eps": self.settings.eps})

    def elementwise_optimizer(self, context: StageContext) -> Optimizer:
        """Return AdamW."""
        return self.matrix_optimizer(context)


def linear_factor(slope: float, staleness: int) -> float:
    """Return ``1 - slope * staleness``."""
    return 1.0 - slope * staleness


def article_beta1(staleness: int) -> float:
    """Return ``0.9 + 0.1 exp(-staleness / 20)``, which is 1 for no staleness."""
    return 0.9 + 0.1 * math.exp(-staleness / 20)


def discount(lr: float, delay: float, update: int, horizon: float) -> float:
    """Return ``lr / delay^p`` with ``p = 1 - min(update / horizon, 1)`` (PipeMare's T1; 1-based ``update``)."""
    return lr / delay ** (1.0 - min(update / horizon, 1.0))
