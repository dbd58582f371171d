"""Cross-entropy over logits whose vocabulary is cut over tensor-parallel ranks.

Megatron's fused version rounds gradients to bf16 whatever the model's type, and the other one needs its global process
groups; neither leaves out the padded part of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _VocabularyParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, vocabulary: int, group: dist.ProcessGroup) -> Tensor:
        columns, parallel = logits.size(-1), group.size() > 1
        start = group.rank() * columns
        scores = logits.detach().to(torch.float32, copy=True)
        scores[..., max(vocabulary - start, 0) :] = -torch.inf
        peak = scores.amax(-1)
        if parallel:
            dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
        scores -= peak[..., None]
        local = target - start
        here = (local >= 0) & (local < columns)
        local = local.clamp(0, columns - 1)
        picked = torch.where(here, scores.gather(-1, local[..., None]).squeeze(-1), 0.0)
        weights = scores.exp_()
        sums = torch.stack((weights.sum(-1), picked))
        if parallel:
            dist.all_reduce(sums, group=group)
        total, picked = sums
        weights /= total[..., None]
        ctx.save_for_backward(weights, local, here)
        ctx.dtype = logits.dtype
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        probabilities, local, here = ctx.saved_tensors
        result = probabilities * grad[..., None]
        rows = torch.arange(local.numel(), device=local.device)
        # one element per row, so plain indexing is enough and, unlike scatter_add, deterministic on a GPU
        flat = result.view(-1, result.size(-1))
        flat[rows, local.flatten()] -= torch.where(here, grad, 0.0).flatten()
        return result.to(ctx.dtype), None, None, None


def vocabulary_parallel_cross_entropy(
    logits: Tensor, target: Tensor, vocabulary: int, group: dist.ProcessGroup
) -> Tensor:
    """Return the fp32 loss ``log(sum_j exp(logit_j)) - logit_target`` of every token, equal on all ranks of ``group``.

    logits: ``[..., columns]``, this rank's equal share of the padded vocabulary, in rank order; any float type, the
        arithmetic is fp32.
    target: ``[...]`` int64 token ids below ``vocabulary``, the same on all ranks.
    vocabulary: number of real tokens; columns from there on are padding, count for nothing and get no gradient.

    Collective over ``group`` (one maximum and one sum of two numbers per token; none if it has one rank).  Each rank
    gets the gradient of its own logits, as if the loss were counted once.
    """
    return _VocabularyParallel.apply(logits, target, vocabulary, group)  # type: ignore[return-value]
