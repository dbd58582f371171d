"""1F1B with flush (PipeDream-Flush): GPipe's updates with fewer activations alive."""

from __future__ import annotations

from impl.rotation.method import method
from impl.rotation.methods.common import AdamWMethod


@method("1f1b-flush", "1F1B with flush")
class OneFOneBFlush(AdamWMethod):
    """AdamW on the mean gradient of an update's microbatches, all at one version; every update drains."""

    schedule = "1f1b-flush"
    modes = ("sync",)
