"""Muon under delay: no second moment to go stale.  Its momentum is a setting to tune, like beta1."""

from __future__ import annotations

from pydantic import Field

from impl.optimizers.base import Optimizer, create
from impl.optimizers.muon import MuonHyper
from impl.rotation.method import StageContext, method
from impl.rotation.methods.common import StageMethod


class MuonStageHyper(MuonHyper):
    """Settings of Muon, and ``lr_slope`` (see :class:`impl.rotation.methods.common.StageHyper`)."""

    lr_slope: float = Field(default=0.0, ge=0.0)


@method("muon", "Muon")
class MuonPipeline(StageMethod):
    """Muon for matrices, AdamW for everything else."""

    Hyper = MuonStageHyper

    def matrix_optimizer(self, context: StageContext) -> Optimizer:
        """Return Muon."""
        return create("muon", self.hyper.model_dump(include=set(MuonHyper.model_fields)))
