"""AdamW without momentum under delay: momentum adds staleness of its own."""

from __future__ import annotations

from impl.rotation.method import method
from impl.rotation.methods.common import AdamWMethod, AdamWStageHyper, Beta


class AdamWBeta1ZeroHyper(AdamWStageHyper):
    """Settings of AdamW with another default: no momentum."""

    beta1: Beta = 0.0


@method("adamw-beta1-zero", "AdamW, beta1 = 0")
class AdamWBeta1Zero(AdamWMethod):
    """PipeDream with ``beta1 = 0``."""

    Hyper = AdamWBeta1ZeroHyper
