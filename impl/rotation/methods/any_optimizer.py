"""A pipeline method for every optimizer that has none of its own, under the optimizer's name."""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from pydantic import Field, create_model

from impl.optimizers.base import HyperParameters, Optimizer, create
from impl.optimizers.base import registry as optimizers
from impl.rotation.method import Method, StageContext
from impl.rotation.methods.common import StageMethod


class AnyOptimizer(StageMethod):
    """PipeDream with an optimizer of the registry, with its settings and ``lr_slope``.

    An elementwise optimizer takes all parameters, another one the matrices, and AdamW the rest.
    """

    def matrix_optimizer(self, context: StageContext) -> Optimizer:
        """Return the optimizer."""
        return create(self.name, self.hyper.model_dump(exclude={"lr_slope"}))

    def elementwise_optimizer(self, context: StageContext) -> Optimizer:
        """Return the optimizer itself if it is elementwise, else AdamW."""
        optimizer = self.matrix_optimizer(context)
        return super().elementwise_optimizer(context) if optimizer.atomic else optimizer


def of_registry() -> dict[str, type[Method]]:
    """Return a method for every optimizer, by the optimizer's name."""
    return {name: of(name, cls.Hyper) for name, cls in optimizers().items()}


@cache
def of(name: str, hyper: type[HyperParameters]) -> type[Method]:
    """Return the method of the optimizer ``name`` with the settings ``hyper``."""
    slope: Any = (float, Field(default=0.0, ge=0.0))
    settings = create_model(f"{hyper.__name__}OnStages", __base__=hyper, lr_slope=slope)
    own = {"name": name, "display_name": name, "Hyper": settings, "__doc__": AnyOptimizer.__doc__}
    return cast(type[Method], type(f"{hyper.__name__}Pipeline", (AnyOptimizer,), own))
