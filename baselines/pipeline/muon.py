"""Muon under delay: no second moment to go stale.  Its momentum is a setting to tune, like beta1."""

from __future__ import annotations

from impl.optimizers.muon import MuonHyper
from impl.rotation.method import method
from impl.rotation.methods import any_optimizer

MuonPipeline = method("muon", "Muon")(any_optimizer.of("muon", MuonHyper))
