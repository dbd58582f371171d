"""The description of one parameter that planner, engine and checkpoints share."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of a model, as a whole tensor, with the way tensor parallelism cuts it.

    name: Megatron's qualified name, for example ``decoder.layers.3.mlp.linear_fc1.weight``.
    shape: of the whole tensor, vocabulary padding included.
    tp_dim: the dimension cut over tensor-parallel ranks; None if every rank holds the whole tensor.
    blocks: sizes along ``tp_dim`` of blocks that are cut each on its own.  A fused gate/up matrix of ``2f`` rows has
        blocks ``(f, f)``: rank r holds ``[gate_r; up_r]``, which is not the r-th slice of ``[gate; up]``.
        Empty means one block.
    partial_over_tp: a replicated parameter whose gradient on each tensor-parallel rank covers only that rank's heads
        (q/k-norm), so that it must be summed over the tensor-parallel group.
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    blocks: tuple[int, ...] = ()
    partial_over_tp: bool = False

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def sharded_blocks(self) -> tuple[int, ...]:
        """Sizes along ``tp_dim`` of the independently cut blocks, at least one."""
        if self.tp_dim is None:
            raise ValueError(f"{self.name} is not cut by tensor parallelism")
        return self.blocks or (self.shape[self.tp_dim],)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Shape of the shard that one of ``tp`` tensor-parallel ranks holds."""
        if self.tp_dim is None or tp == 1:
            return self.shape
        for block in self.sharded_blocks:
            if block % tp:
                raise ValueError(f"{self.name}: {block} rows or columns cannot be cut over TP={tp}")
        return tuple(n // tp if d == self.tp_dim else n for d, n in enumerate(self.shape))

    def local_numel(self, tp: int) -> int:
        """Elements of one tensor-parallel shard."""
        return math.prod(self.local_shape(tp))
