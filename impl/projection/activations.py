"""Bytes of activations that a model keeps from a microbatch's forward to its backward.

Counted tensor by tensor as in Korthikanti et al. 2022 (arXiv 2205.05198, section 4), for this project's layers; a test
compares the count with what autograd keeps.  Weights, gradients and what is freed before the forward ends are not
activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from impl.models.catalogue import Architecture

Recompute = Literal["none", "selective-attention", "layer", "stage"]
"""What a backward computes again: nothing; the core attention; each layer from its input; all layers from the first
one's input."""


@dataclass(frozen=True)
class HeadBytes:
    """What final norm, output matrix and loss need on one rank.

    kept: from forward to backward, with the fp32 probabilities of the cross-entropy.
    working: besides, while the backward turns them into the gradient of the logits.
    """

    kept: float
    working: float


def activation_bytes(
    arch: Architecture, tokens: int, dtype_bytes: int, tp: int, recompute: Recompute, sequence_parallel: bool
) -> float:
    """Return the bytes that one layer keeps of a microbatch of ``tokens`` on one of ``tp`` tensor-parallel ranks.

    For the layer of :mod:`impl.models.gpt`: RMSNorm, grouped queries, fused attention, SwiGLU without a fused kernel.
    Per token, in elements of ``dtype_bytes``, ``h`` hidden, ``q`` and ``k`` the widths of all query and of all key
    heads, ``f`` of the MLP, ``t`` tensor-parallel ranks, and ``s = t`` under sequence parallelism, else 1::

        4 h / s                   input and output of both norms (the output is the next matrix' input)
        (q + 2 k) / t             the fused query, key and value, of which the values are read later
        q / t                     only with q/k norms: the queries put side by side, their norm's input
        (q + k) / t               rotated queries and keys, as attention reads them
        q / t                     attention's output, which the projection reads
        5 f / t                   gate and up, silu(gate), up again, and the product (a fused SwiGLU keeps 3 f)

    and 4 bytes for each row of a norm, and for each token and query head of the fused attention's log-sums, which
    ``selective-attention`` does not keep; nothing grows with the square of the sequence.

    recompute: ``layer`` keeps the layer's input alone, ``stage`` nothing: a stage's input is not a layer's, see
        :func:`boundary_bytes`.
    """
    s = tp if sequence_parallel else 1
    if recompute == "stage":
        return 0.0
    if recompute == "layer":
        return dtype_bytes * tokens * arch.hidden_size / s
    queries, keys = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
    wide = (4 if arch.qk_norm else 3) * queries + 3 * keys + 5 * arch.intermediate_size
    rows = 2 / s + (arch.num_attention_heads + arch.num_key_value_heads) / tp * arch.qk_norm
    sums = 0 if recompute == "selective-attention" else arch.num_attention_heads / tp
    return tokens * (dtype_bytes * (4 * arch.hidden_size / s + wide / tp) + 4 * (rows + sums))


def boundary_bytes(arch: Architecture, tokens: int, dtype_bytes: int) -> float:
    """Return the bytes of the hidden states of a microbatch: what one stage sends to the next."""
    return float(dtype_bytes * tokens * arch.hidden_size)


def embedding_bytes(tokens: int) -> float:
    """Return the bytes that the embedding keeps: its token ids.  Its output is the first layer's input."""
    return 8.0 * tokens


def head_bytes(arch: Architecture, tokens: int, dtype_bytes: int, tp: int) -> HeadBytes:
    """Return what final norm, output matrix and loss need; the vocabulary's padding is left out."""
    columns = arch.vocab_size / tp
    kept = 2 * dtype_bytes * tokens * arch.hidden_size + 4 * tokens * columns
    return HeadBytes(kept, (4 + dtype_bytes) * tokens * columns)
