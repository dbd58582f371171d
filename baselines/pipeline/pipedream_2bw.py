"""PipeDream-2BW (Narayanan et al., ICML 2021): gradients accumulated over microbatches, two versions of the weights."""

from __future__ import annotations

from impl.rotation.method import method
from impl.rotation.methods.common import AdamWMethod


@method("pipedream-2bw", "PipeDream-2BW")
class PipeDream2BW(AdamWMethod):
    """Every stage computes update t at version t - 1: a staleness of one update everywhere, with AdamW."""

    schedule = "1f1b-async"
    modes = ("2bw",)
