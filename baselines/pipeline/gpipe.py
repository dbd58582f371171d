"""GPipe (Huang et al., 2019): all forwards of an update, then all its backwards; no staleness, a bubble instead."""

from __future__ import annotations

from impl.rotation.method import method
from impl.rotation.methods.common import AdamWMethod


@method("gpipe", "GPipe")
class GPipe(AdamWMethod):
    """AdamW on the mean gradient of an update's microbatches, all at one version."""

    schedule = "gpipe"
    modes = ("sync",)
