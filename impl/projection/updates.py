"""What the update of a matrix costs a rank, by the way in which tensor parallelism takes part in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from impl.errors import ConfigError
from impl.optimizers.base import Optimizer, Shape, Work, numel
from impl.optimizers.muon import Muon
from impl.projection.hardware import Group
from impl.projection.machine import BYTES, Machine
from impl.projection.ranks import Matrix
from impl.projection.uncertain import Cost, total
from impl.projection.workload import TpUpdate


class GramMuon(Muon):
    """Muon on the shard of a matrix ``[uncut, cut / tp]``, with Gram matrices of the uncut side summed over TP.

    Megatron's mode ``distributed``.  It only says what it costs: the update itself is not implemented here.
    """

    name: ClassVar[str] = "muon-distributed"

    def flops(self, shape: Shape) -> float:
        """Return ``K (4 u^2 c + 2 u^3)`` for the shard ``[u, c]``: Gram matrix, its square, their product with X."""
        uncut, cut = shape
        return float(self.settings.ns_steps * (4 * uncut**2 * cut + 2 * uncut**3))

    def work(self, shape: Shape) -> Work:
        """Return the products of :meth:`flops` and Muon's elementwise passes over the shard."""
        kernels = 14 + 3 * self.settings.ns_steps
        return Work(products={self.settings.ns_dtype: self.flops(shape)}, passes=60.0 * numel(shape), kernels=kernels)


@dataclass
class Updates:
    """Costs of whole matrices on ``machine``.

    mode: ``exchange``, what the plan says; ``blockwise``, Newton-Schulz on the shard alone, which is not Muon on the
        whole matrix; ``distributed``, exact, with a sum of Gram matrices over TP in each Newton-Schulz step.

    Raises :class:`ConfigError` for the last two unless the optimizer is Muon.
    """

    machine: Machine
    optimizer: Optimizer
    tp: int
    mode: TpUpdate = "exchange"

    def __post_init__(self) -> None:
        if self.mode != "exchange" and not isinstance(self.optimizer, Muon):
            raise ConfigError(f"--tp-update {self.mode} is for muon: {self.optimizer.name} needs exchange")

    def compute(self, matrix: Matrix) -> Cost:
        """Return the time of a rank's part of the update of ``matrix``."""
        if self.mode == "exchange" or matrix.tp_dim is None:
            return total([self.machine.update(self.optimizer, shape) for shape in matrix.shapes])
        if self.mode == "blockwise":
            return total([self.machine.update(self.optimizer, shape) for shape in matrix.shards(self.tp)])
        gram = GramMuon(self.optimizer.hyper)
        return total([self.machine.update(gram, shape) for shape in self._turned(matrix)])

    def gram_bytes(self, matrix: Matrix) -> list[int]:
        """Return the bytes of each Gram matrix that is summed over TP in ``distributed``, one a Newton-Schulz step."""
        if self.mode != "distributed" or matrix.tp_dim is None:
            return []
        assert isinstance(self.optimizer, Muon)
        settings = self.optimizer.settings
        return [BYTES[settings.ns_dtype] * uncut**2 for uncut, _ in self._turned(matrix)] * settings.ns_steps

    def counted(self, matrix: Matrix) -> int:
        """Return the logical bytes of those sums on each rank."""
        return sum(round(2 * (self.tp - 1) / self.tp * count) for count in self.gram_bytes(matrix))

    def communicate(self, matrix: Matrix) -> Cost:
        """Return the time of the sums of Gram matrices."""
        group = Group(self.tp)
        return total([self.machine.collective("all-reduce", [count], group) for count in self.gram_bytes(matrix)])

    def _turned(self, matrix: Matrix) -> list[tuple[int, int]]:
        """Return the shards' shapes as ``[uncut, cut / tp]``."""
        assert matrix.tp_dim is not None
        return [(shard[1 - matrix.tp_dim], shard[matrix.tp_dim]) for shard in matrix.shards(self.tp)]
