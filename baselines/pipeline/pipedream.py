"""PipeDream (Narayanan et al., SOSP 2019): asynchronous 1F1B with stashed weights and AdamW."""

from __future__ import annotations

from impl.rotation.method import method
from impl.rotation.methods.common import AdamWMethod


@method("pipedream", "PipeDream (AdamW)")
class PipeDream(AdamWMethod):
    """AdamW on stale gradients, with nothing done about the delay."""
