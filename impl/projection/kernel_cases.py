"""What can be measured: one case per kernel, plain data that a measuring process is started with."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from impl.harness.spec import Frozen, RuntimeSpec
from impl.harness.tiers import canonical_digest
from impl.models import catalogue
from impl.optimizers.base import Optimizer, create, numel
from impl.projection import kernel_table
from impl.projection.machine import BYTES, Block, Collective

Names = list[tuple[str, str, int]]
"""Kernel, key and size of each row that a case yields."""
COLD_BYTES = 48 * 2**20
"""Cases go through this much data before they come back to the same, as a step does: no cache keeps it."""


class BlockCase(Frozen):
    """``forward`` and ``backward`` of a part of a model; ``copies`` layers run one after the other, as in a model."""

    case: Literal["block"] = "block"
    model: str
    kind: Literal["layer", "embedding", "head"]
    tp: int
    rows: int
    sequence: int
    dtype: str
    copies: int = 1

    @property
    def block(self) -> Block:
        """What is measured."""
        arch = catalogue.load(self.model).arch
        return Block(arch, self.kind, self.tp, self.rows, self.sequence, self.dtype)

    def names(self) -> Names:
        """Return its two rows."""
        key = kernel_table.block_key(self.block)
        return [("forward", key, 0), ("backward", key, 0)]

    def bytes(self) -> float:
        """Return a lower bound of the memory that it needs: weights, their gradients, activations of the forward."""
        block = self.block
        weights = block.product_flops / (2 * block.tokens) + (
            block.arch.hidden_size * block.arch.vocab_size / block.tp if self.kind == "embedding" else 0.0
        )
        return self.copies * (weights * (2 * BYTES[self.dtype] + 4) + block.elementwise_bytes)


class UpdateCase(Frozen):
    """``update`` of ``batch`` equal tensors in one call, as many as a rank has in a micro-group."""

    case: Literal["update"] = "update"
    optimizer: str
    settings: dict[str, Any] = Field(default_factory=dict)
    shape: tuple[int, ...]
    batch: int = 1

    @property
    def rule(self) -> Optimizer:
        """The optimizer."""
        return create(self.optimizer, self.settings)

    def names(self) -> Names:
        """Return its row."""
        return [("update", *kernel_table.update_key(self.rule, self.shape))]

    @property
    def set_bytes(self) -> float:
        """Bytes of gradients, updates and state of one batch."""
        return self.batch * (8.0 * numel(self.shape) + self.rule.state_bytes(self.shape))

    def bytes(self) -> float:
        """Return a lower bound of the memory that it needs: the data twice, for what the computation holds."""
        return 2.0 * self.set_bytes


class PassCase(Frozen):
    """A pass over ``size`` elements in pieces of ``piece``: ``apply``, ``norm`` (of whole matrices), ``norm-exact`` (of
    what may be cut anywhere); or a ``copy`` of ``size`` bytes, on the device or from the host.
    """

    case: Literal["apply", "norm", "norm-exact", "copy", "copy-from-host"]
    size: int = Field(gt=0)
    dtype: str = "float32"
    piece: int = Field(gt=0)

    def names(self) -> Names:
        """Return its row."""
        return [(self.case, self.dtype, self.size)]

    def bytes(self) -> float:
        """Return the memory that it needs."""
        if self.case.startswith("copy"):
            return 2.0 * self.size
        return 4.0 * self.size * (3 if self.case == "apply" else 1) + 16.0 * min(self.piece, self.size)


class ProductCase(Frozen):
    """``product`` of ``[m, k]`` activations and ``[k, n]`` weights."""

    case: Literal["product"] = "product"
    m: int
    n: int
    k: int
    dtype: str

    def names(self) -> Names:
        """Return its row."""
        return [("product", kernel_table.product_key(self.m, self.n, self.k, self.dtype), 0)]

    def bytes(self) -> float:
        """Return the memory of the factors and the result."""
        return float(BYTES[self.dtype] * (self.m * self.k + self.k * self.n + self.m * self.n))


class CollectiveCase(Frozen):
    """A collective of groups of ``ranks`` neighbours; all groups of the processes are busy.

    size: as :meth:`impl.projection.machine.Machine.collective` counts it, the segments of a scatter or gather together.
    even: whether segments are equal; unequal ones are rooted calls.
    """

    case: Literal["collective"] = "collective"
    kind: Collective
    ranks: int = Field(gt=1)
    size: int = Field(gt=0)
    even: bool = True

    def names(self) -> Names:
        """Return its row."""
        return [(self.kind, kernel_table.collective_key(self.ranks, even=self.even), self.size)]

    def bytes(self) -> float:
        """Return the memory of the buffers."""
        return 3.0 * self.size


class LaunchCase(Frozen):
    """``launch``: seconds between two of many tiny operations."""

    case: Literal["launch"] = "launch"

    def names(self) -> Names:
        """Return its row."""
        return [("launch", "add", 0)]

    def bytes(self) -> float:
        """Return next to nothing."""
        return 8.0


Case = Annotated[
    BlockCase | UpdateCase | PassCase | ProductCase | CollectiveCase | LaunchCase, Field(discriminator="case")
]


class KernelsSpec(Frozen):
    """One job of ``processes`` that measure ``cases`` in lockstep.

    seconds: after which what is left is not measured.  case_seconds: about what a case may take.
    """

    cases: tuple[Case, ...]
    processes: int = Field(default=1, gt=0)
    seconds: float = Field(default=600.0, gt=0)
    case_seconds: float = Field(default=0.5, gt=0)
    runtime: RuntimeSpec = RuntimeSpec(collective_timeout_s=120.0)

    def resolved(self) -> dict[str, Any]:
        """Return every setting as plain data."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """SHA-256 of the settings."""
        return canonical_digest(self.resolved())
