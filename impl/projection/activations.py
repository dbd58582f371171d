"""Bytes of activations that a model keeps from a microbatch's forward to its backward.

Counted tensor by tensor as in Korthikanti et al. 2022 (arXiv 2205.05198, section 4), adapted: RMSNorm, SwiGLU and
grouped key and value heads for theirs, no dropout, so no masks, and attention that keeps its output and a logarithm a
row instead of the scores.  Weights, gradients and what is freed before the forward ends are not activations.
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
    arch: Architecture,
    tokens: int,
    dtype_bytes: int,
    tp: int,
    recompute: Recompute,
    sequence_parallel: bool,
    sequence: int,
    *,
    fused_attention: bool = True,
) -> float:
    """Return the bytes that one layer keeps of a microbatch of ``tokens`` on one of ``tp`` tensor-parallel ranks.

    Kept are the inputs of everything with a gradient: of both norms and of the products after them, queries, keys and
    values (before their norm too, where there is one), attention output, the gate/up product's output, the activated
    gate and its product with ``up``.

    sequence_parallel: what all tensor-parallel ranks would hold alike is cut over them.
    sequence: tokens of one sequence; counts only where attention is not fused and keeps ``sequence`` scores and
        probabilities for each head and token.
    recompute: ``layer`` keeps the layer's input alone, ``stage`` nothing: a stage's input is not a layer's, see
        :func:`boundary_bytes`.
    """
    replicated = tp if sequence_parallel else 1
    whole = dtype_bytes * tokens * arch.hidden_size / replicated
    if recompute == "stage":
        return 0.0
    if recompute == "layer":
        return whole
    queries, keys = arch.num_attention_heads * arch.head_dim, arch.num_key_value_heads * arch.head_dim
    cut = 2 * queries + 2 * keys + 4 * arch.intermediate_size
    if arch.qk_norm:
        cut += queries + keys
    kept = 4 * whole + dtype_bytes * tokens * cut / tp
    if recompute == "none":
        kept += _scores(arch, tokens, dtype_bytes, sequence, fused_attention) / tp
    return kept


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


def _scores(arch: Architecture, tokens: int, dtype_bytes: int, sequence: int, fused: bool) -> float:
    """Return what the core attention keeps beside its inputs and output: a fp32 logarithm a row, or two score maps."""
    rows = float(tokens * arch.num_attention_heads)
    return 4 * rows if fused else 2 * dtype_bytes * rows * sequence
