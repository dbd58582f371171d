"""The description of one parameter that planner, engine and checkpoints share."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Fragment:
    """A matrix inside a fused one: rows ``start .. stop`` of the whole tensor, one range after the other."""

    name: str
    rows: tuple[tuple[int, int], ...]

    @property
    def count(self) -> int:
        """Number of its rows."""
        return sum(stop - start for start, stop in self.rows)


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
    fragments: the matrices that an optimizer updates one by one, together all rows; empty for the whole as one.
    part_of, first: a block of the module's parameter ``part_of`` that a plan treats as a parameter of its own, with its
        first row there (:meth:`in_blocks`).
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    blocks: tuple[int, ...] = ()
    partial_over_tp: bool = False
    fragments: tuple[Fragment, ...] = ()
    part_of: str | None = None
    first: int = 0

    @property
    def module(self) -> str:
        """Name of the module's parameter."""
        return self.part_of or self.name

    @property
    def matrices(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what an optimizer updates one by one."""
        return tuple((f.count, *self.shape[1:]) for f in self.fragments) or (self.shape,)

    def local_matrices(self, tp: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of :attr:`matrices` if each were cut over ``tp`` ranks on its own, at least one row or column each."""
        return tuple(
            tuple(max(1, n // tp) if d == self.tp_dim else n for d, n in enumerate(shape)) for shape in self.matrices
        )

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

    def in_blocks(self) -> tuple[ParamSpec, ...]:
        """Return a parameter for each block where the blocks are just the fragments (gate and up), else this one.

        Such blocks are contiguous in every tensor-parallel shard; the fragments of a fused QKV matrix are not.
        """
        ends = [sum(self.blocks[: i + 1]) for i in range(len(self.blocks))]
        spans = tuple(((end - size, end),) for end, size in zip(ends, self.blocks, strict=True))
        if self.tp_dim != 0 or len(spans) < 2 or tuple(f.rows for f in self.fragments) != spans:
            return (self,)
        return tuple(
            dataclasses.replace(
                self,
                name=f"{self.name}/{fragment.name}",
                shape=(fragment.count, *self.shape[1:]),
                blocks=(),
                fragments=(),
                part_of=self.name,
                first=fragment.rows[0][0],
            )
            for fragment in self.fragments
        )
