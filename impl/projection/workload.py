"""What is trained in one step: tokens, precision, and what of the activations is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from impl.errors import ConfigError
from impl.harness.spec import Frozen
from impl.models.catalogue import ModelConfig
from impl.projection.machine import BYTES, Block, Collective

TpUpdate = Literal["exchange", "blockwise", "distributed"]
Uneven = Literal["rooted", "padded"]


class Workload(Frozen):
    """One training step.

    sequence: tokens of a sequence.  batch: sequences of a step over all DP ranks; microbatches: into how many each
        rank's share is accumulated.
    dtype: of parameters and activations; gradients are summed in fp32.
    recompute: ``none``; ``selective-attention`` runs the core attention again in the backward; ``full`` runs every
        layer again from its input.
    sequence_parallel: norms and residual sums work on a TP rank's share of the tokens (Korthikanti et al., 2022); the
        engine's own model does not do that.
    """

    sequence: int = Field(default=2048, gt=0)
    batch: int = Field(default=128, gt=0)
    microbatches: int = Field(default=1, gt=0)
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    recompute: Literal["none", "selective-attention", "full"] = "none"
    sequence_parallel: bool = True

    def rows(self, dp: int) -> int:
        """Return the sequences of one microbatch on one DP rank; raises :class:`ConfigError` if they do not divide."""
        if self.batch % (dp * self.microbatches):
            ranks = f"{dp} x {self.microbatches}"
            raise ConfigError(f"batch {self.batch} is not a multiple of dp x microbatches ({ranks})")
        return self.batch // (dp * self.microbatches)

    @property
    def tokens(self) -> int:
        """Tokens of a step over all ranks."""
        return self.batch * self.sequence

    @property
    def size(self) -> int:
        """Bytes of one element of ``dtype``."""
        return BYTES[self.dtype]


@dataclass(frozen=True)
class Talk:
    """One tensor-parallel collective of the model: its kind and its bytes before they are shared out."""

    kind: Collective
    whole: int

    def counted(self, tp: int) -> int:
        """Return the logical bytes of each rank, as :class:`impl.canzona.collectives.Ledger` counts them."""
        return round((2 if self.kind == "all-reduce" else 1) * (tp - 1) / tp * self.whole)

    def sizes(self, tp: int) -> list[float]:
        """Return what :meth:`impl.projection.machine.Machine.collective` is told."""
        return [self.whole] if self.kind == "all-reduce" else [self.whole / tp] * tp


def blocks(config: ModelConfig, work: Workload, dp: int, tp: int) -> list[Block]:
    """Return the blocks of one microbatch's forward in order: embedding, layers, head."""
    rows, kinds = work.rows(dp), ["embedding", *["layer"] * config.arch.num_hidden_layers, "head"]
    share = tp if work.sequence_parallel else 1
    return [Block(config.arch, kind, tp, rows, work.sequence, work.dtype, share) for kind in kinds]  # type: ignore[arg-type]


def talks(block: Block, work: Workload, direction: Literal["forward", "backward"]) -> list[Talk]:
    """Return the blocking collectives over the TP group of a block's forward or backward.

    A layer has two all-reduces each way; under sequence parallelism each is a reduce-scatter and an all-gather of the
    same volume together.  The head's loss takes one maximum and two sums of a number per token.
    """
    if block.tp == 1:
        return []
    hidden = block.tokens * block.arch.hidden_size * BYTES[block.dtype]
    loss = [Talk("all-reduce", 4 * block.tokens), Talk("all-reduce", 8 * block.tokens)]
    scatter, gather, reduce = (Talk(k, hidden) for k in ("reduce-scatter", "all-gather", "all-reduce"))
    if not work.sequence_parallel:
        found = {
            ("embedding", "forward"): [reduce],
            ("embedding", "backward"): [],
            ("head", "forward"): loss,
            ("head", "backward"): [reduce],
        }
        return found.get((block.kind, direction), [reduce, reduce])
    found = {
        ("embedding", "forward"): [scatter],
        ("embedding", "backward"): [gather],
        ("head", "forward"): [gather, *loss],
        ("head", "backward"): [scatter],
    }
    return found.get((block.kind, direction), [gather, scatter, gather, scatter])
