"""How long one piece of work takes on a machine: the only thing a projection asks of it.

:class:`Roofline` answers from data sheets and assumptions about what is reached of them;
:class:`impl.projection.measured.Measured` from a kernel table.  Every answer says which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from impl.errors import ConfigError
from impl.models.catalogue import Architecture
from impl.optimizers.base import Optimizer, Shape
from impl.projection.hardware import Group, Hardware, Precision, Reached
from impl.projection.uncertain import Cost, total

CopyTo = Literal["device", "host"]
Collective = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send"]
LIMBS_USED = 5
"""Of the exact norm's, until nothing of typical gradients is left."""
BYTES = {"float32": 4, "bfloat16": 2, "float64": 8}


@dataclass(frozen=True)
class Block:
    """What one rank computes of a model for one microbatch: a part of it on one of ``tp`` tensor-parallel ranks.

    kind: one ``layer``, the ``embedding``, or the ``head``: final norm, output matrix and loss.
    rows: sequences of the microbatch, ``sequence`` tokens each.  dtype: of weights and activations.
    norm_ranks: tensor-parallel ranks that share the tokens of norms and residual sums (sequence parallelism).
    """

    arch: Architecture
    kind: Literal["layer", "embedding", "head"]
    tp: int
    rows: int
    sequence: int
    dtype: str
    norm_ranks: int = 1

    @property
    def weights(self) -> float:
        """Elements of this rank's weight matrices, the embedding's table included."""
        a = self.arch
        if self.kind != "layer":
            return a.hidden_size * a.vocab_size / self.tp
        queries, keys = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
        return a.hidden_size * (2.0 * queries + 2.0 * keys + 3.0 * a.intermediate_size) / self.tp

    @property
    def tokens(self) -> int:
        """Tokens of the microbatch."""
        return self.rows * self.sequence

    @property
    def product_flops(self) -> float:
        """FLOPs of the forward's products of activations and weights on this rank."""
        return 0.0 if self.kind == "embedding" else 2.0 * self.tokens * self.weights

    @property
    def attention_flops(self) -> float:
        """FLOPs of the forward's causal attention scores and their product with the values, on this rank."""
        if self.kind != "layer":
            return 0.0
        queries = self.arch.num_attention_heads * self.arch.head_dim
        return 2.0 * self.tokens * self.sequence * queries / self.tp

    @property
    def elementwise_bytes(self) -> float:
        """Bytes that the forward's norms, activation, residual sums and loss read and write on this rank."""
        a, size = self.arch, BYTES[self.dtype]
        hidden = a.hidden_size / self.norm_ranks
        if self.kind == "embedding":
            return 3.0 * size * self.tokens * hidden
        if self.kind == "head":
            return self.tokens * (4.0 * size * hidden + 10.0 * a.vocab_size / self.tp)
        rotated = a.num_attention_heads + a.num_key_value_heads
        width = 10.0 * hidden + (4.0 * rotated * a.head_dim + 5.0 * a.intermediate_size) / self.tp
        return size * self.tokens * width


class Machine(Protocol):
    """A machine for which projections are made."""

    @property
    def name(self) -> str:
        """Of the hardware, as people call it."""
        ...

    @property
    def memory_bytes(self) -> int | None:
        """Of one device, None if it is not known."""
        ...

    @property
    def shared(self) -> bool:
        """Whether communication runs on the cores that compute."""
        ...

    @property
    def cores(self) -> int | None:
        """CPU cores that all ranks share, None where each has a device of its own."""
        ...

    @property
    def devices_per_node(self) -> int:
        """Ranks that fill a node before the next one begins."""
        ...

    def forward(self, block: Block) -> Cost:
        """Return the time of a block's forward."""
        ...

    def attention(self, block: Block) -> Cost:
        """Return the time of a layer's core attention alone, a part of its forward."""
        ...

    def backward(self, block: Block) -> Cost:
        """Return the time of a block's backward, gradients added to the fp32 buffer."""
        ...

    def gradients(self, block: Block) -> Cost:
        """Return the time of what a step does once with the fp32 gradients of a block: zero before, scale after.

        Nothing where :meth:`backward` already contains it.
        """
        ...

    def update(self, optimizer: Optimizer, shape: Shape) -> Cost:
        """Return the time of one update of a whole tensor: the mean over a refresh period."""
        ...

    def apply(self, elements: int, dtype: str) -> Cost:
        """Return the time of decay and step on fp32 masters, rounded into parameters of ``dtype``."""
        ...

    def norm(self, elements: int, *, exact: bool = False) -> Cost:
        """Return the time of the sum of squares of fp32 gradients.

        exact: of what may be cut anywhere, summed as integers (:func:`impl.canzona.norm.square_limbs`).
        """
        ...

    def copy(self, count: float, where: CopyTo) -> Cost:
        """Return the time of copying ``count`` bytes inside the device's memory, or between it and the host's."""
        ...

    def collective(self, kind: Collective, sizes: Sequence[float], group: Group) -> Cost:
        """Return the time of one collective.

        sizes: bytes of each rank's segment of a ``reduce-scatter`` or ``all-gather``, unequal ones as rooted calls; for
            the others one number: the bytes that are reduced, sent by the busiest rank of an ``all-to-all``, or sent.
        """
        ...


@dataclass
class Roofline:
    """A machine known by its data sheets, and by assumptions about what kernels reach of them."""

    hardware: Hardware
    _updates: dict[tuple[str, str, Shape], Cost] = field(default_factory=dict)

    shared = False
    cores = None

    @property
    def name(self) -> str:
        """Of the hardware."""
        return self.hardware.name

    @property
    def memory_bytes(self) -> int:
        """Of one device."""
        return self.hardware.memory_bytes

    @property
    def devices_per_node(self) -> int:
        """Of the hardware."""
        return self.hardware.spec.node.devices

    def forward(self, block: Block) -> Cost:
        """Return the forward's products, attention and elementwise passes, one after the other."""
        return self._block(block, 1.0)

    def backward(self, block: Block) -> Cost:
        """Return twice the forward, and the gradients' way into the fp32 buffer; the embedding's are dense."""
        added = (8.0 + BYTES[block.dtype] * (3 if block.kind == "embedding" else 1)) * block.weights
        return self._block(block, 2.0) + self._passes(added)

    def gradients(self, block: Block) -> Cost:
        """Return 12 bytes an element: set to zero, read and written to be scaled."""
        return self._passes(12.0 * block.weights)

    def update(self, optimizer: Optimizer, shape: Shape) -> Cost:
        """Return the time of the optimizer's :class:`impl.optimizers.base.Work`."""
        key = optimizer.name, optimizer.hyper.model_dump_json(), shape
        if key not in self._updates:
            work = optimizer.work(shape)
            parts = [self._product(flops, dtype) for dtype, flops in work.products.items()]
            parts += [self._compute(work.qr, "float32", "qr"), self._compute(work.eigh, "float32", "eigh")]
            self._updates[key] = self._launched([*parts, self._passes(work.passes)], work.kernels)
        return self._updates[key]

    def apply(self, elements: int, dtype: str) -> Cost:
        """Return two passes over masters, one over the update, and the parameters' rounding."""
        return self._passes((20 + (0 if dtype == "float32" else 4 + BYTES[dtype])) * elements)

    def norm(self, elements: int, *, exact: bool = False) -> Cost:
        """Return 36 bytes an element: gradients to float64, squared, summed; ``exact`` takes the squares apart.

        A limb takes 88 bytes an element.  Five are assumed: squares of 48 bits that differ by 2^40.
        """
        return self._passes((36.0 + (LIMBS_USED * 88.0 if exact else 0.0)) * elements)

    def attention(self, block: Block) -> Cost:
        """Return the fused attention kernel of one forward."""
        return self._launched([self._compute(block.attention_flops, _precision(block.dtype), "attention")], 1)

    def copy(self, count: float, where: CopyTo) -> Cost:
        """Return a pass that reads and writes, or the way over the host's link."""
        if where == "device":
            return self._passes(2.0 * count)
        link = self.hardware.spec.host
        evidence = f"link: {link.bandwidth / 1e9:g} GB/s to the host at {self.hardware.assumption('host')}"
        return Cost.of(count / link.bandwidth / self.hardware.reached("host") + link.latency, evidence)

    def collective(self, kind: Collective, sizes: Sequence[float], group: Group) -> Cost:
        """Return bandwidth and latency of a ring; of unequal segments all bytes, and a tree of hops for each root.

        An all-reduce of few bytes takes a tree instead, as NCCL's do, whose latency grows with the logarithm of the
        ranks.
        """
        ranks, link = group.ranks, self.hardware.link(group)
        whole = float(sum(sizes))
        if ranks == 1 or whole == 0:
            return Cost.nothing()
        share = (ranks - 1) / ranks
        if kind == "all-reduce":
            moved, hops = 2 * share * whole, 2 * (ranks - 1)
        elif kind in ("reduce-scatter", "all-gather"):
            even = len(set(sizes)) == 1
            used = sum(size > 0 for size in sizes)
            moved, hops = (share * whole, ranks - 1) if even else (whole, used * math.ceil(math.log2(ranks)))
        elif kind == "all-to-all":
            moved, hops = whole, ranks - 1
        else:
            moved, hops = whole, 1
        seconds = moved / link.bandwidth + hops * link.latency
        if kind == "all-reduce":
            levels = 2 * math.ceil(math.log2(ranks))
            seconds = np.minimum(seconds, 2 * whole / link.bandwidth + levels * link.latency)
        return Cost.of(seconds, link.evidence)

    def _block(self, block: Block, times: float) -> Cost:
        parts = [
            self._product(times * block.product_flops, block.dtype),
            self._compute(times * block.attention_flops, _precision(block.dtype), "attention"),
            self._passes(times * block.elementwise_bytes),
        ]
        return self._launched(parts, times * {"layer": 25, "embedding": 2, "head": 8}[block.kind])

    def _product(self, flops: float, dtype: str) -> Cost:
        return self._compute(flops, _precision(dtype), "product" if dtype == "bfloat16" else "product_fp32")

    def _compute(self, flops: float, precision: Precision, what: Reached) -> Cost:
        peaks = self.hardware.spec.device.peak_flops
        if precision not in peaks:
            raise ConfigError(f"hardware {self.hardware.spec.id}: give peak_flops for {precision}")
        named = {"product": "products", "product_fp32": "products"}.get(what, what)
        reached = f"{self.hardware.assumption(what)} of {peaks[precision] / 1e12:g} TFLOP/s"
        return Cost.of(
            flops / peaks[precision] / self.hardware.reached(what), f"roofline: {precision} {named} at {reached}"
        )

    def _passes(self, count: float) -> Cost:
        bandwidth = self.hardware.spec.device.memory_bandwidth
        reached = f"{self.hardware.assumption('memory')} of {bandwidth / 1e12:g} TB/s"
        return Cost.of(count / bandwidth / self.hardware.reached("memory"), f"roofline: memory at {reached}")

    def _launched(self, parts: Sequence[Cost], kernels: float) -> Cost:
        """Return the work of ``parts``, or the time that the host needs to send off its kernels if that is longer."""
        work = total([part for part in parts if part.seconds[0] > 0])
        launches = kernels * self.hardware.launch
        source = f"assumption: {self.hardware.spec.device.launch * 1e6:g} us a kernel launch"
        evidence = work.evidence if work.seconds[0] >= launches[0] else {source: 1.0}
        return Cost(np.maximum(work.seconds, launches), evidence)


def _precision(dtype: str) -> Precision:
    return "bfloat16" if dtype == "bfloat16" else "float64" if dtype == "float64" else "float32"
