"""Whole weights, whatever the tensor-parallel degree: drawing, gathering and hashing them.

Reading and writing Hugging Face folders is in :mod:`impl.models.hf_checkpoint` and offered here too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.models.catalogue import ModelConfig, Part
from impl.models.hf_checkpoint import load_hf, save_hf
from impl.models.hf_layout import RESIDUAL_OUTPUTS, from_hf, hf_names, hf_shapes, to_hf
from impl.models.parameters import ParamSpec
from impl.models.sharding import shard, unshard

# the newer name of the same collective; the older one warns from torch 2.13 on
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

__all__ = ["initialize", "load_hf", "params_digest", "save_hf", "whole_parameters"]


@torch.no_grad()
def initialize(
    model: nn.Module, config: ModelConfig, seed: int, tp_rank: int, tp: int, part: Part | None = None
) -> None:
    """Fill ``model``, the part of tensor-parallel rank ``tp_rank`` of ``tp``, with fresh weights.

    part: the pipeline stage that ``model`` is, by default the whole model.

    Every Hugging Face tensor has its own generator, seeded by ``seed`` and its name: whole weights depend neither on
    the parallel layout nor on the order of parameters, nor on the device (drawn on the CPU in fp32).  Matrices are
    normal with the deviations of ``config.init``, norms are one, padding is zero.  No communication.
    """
    local = dict(model.named_parameters())
    for spec in config.parameters(tp, part):
        drawn = {name: _draw(config, name, shape, seed) for name, shape in hf_shapes(config, spec).items()}
        local[spec.name].copy_(shard(from_hf(config, spec, drawn), spec, tp, tp_rank))


def whole_parameters(
    model: nn.Module, config: ModelConfig, tp_group: dist.ProcessGroup, part: Part | None = None
) -> Iterator[tuple[ParamSpec, Tensor]]:
    """Yield every parameter as a whole tensor, in the model's type and on its device.

    Collective: every rank of ``tp_group`` must run the iterator to its end (one all-gather per cut parameter), also
    ranks that have no use for the result.  The order is that of Hugging Face names in ASCII, not of registration, so
    that :func:`params_digest` has to keep little.  Uncut tensors share the model's memory: use each before asking for
    the next, and clone what must outlive a training step.

    part: the pipeline stage that ``model`` is, by default the whole model.
    """
    tp, local = tp_group.size(), dict(model.named_parameters())
    for spec in sorted(config.parameters(tp, part), key=lambda s: min(hf_names(s))):
        own = local[spec.name].detach()
        if tp > 1 and spec.tp_dim is not None:
            shards = own.new_empty(tp * own.numel())
            _all_gather(shards, own.flatten(), group=tp_group)
            yield spec, unshard(shards.view(tp, *own.shape).unbind(), spec)
        else:
            yield spec, own


def params_digest(config: ModelConfig, whole: Iterable[tuple[ParamSpec, Tensor]]) -> str:
    """Return the SHA-256, as 64 hexadecimal digits, of all ``whole`` parameters.

    Hashed are, for each Hugging Face tensor in ASCII order of names: its name, ``str`` of its shape as a tuple, and
    its elements as little-endian fp32.  Vocabulary padding does not count and tied tensors count once, so the digest
    does not depend on tensor parallelism.  ``whole`` may come in any order; tensors ahead of their turn are kept.

    Raises :class:`ValueError` if a parameter is missing, foreign or comes twice.
    """
    due = sorted((name for spec in config.parameters(1) for name in hf_names(spec)), reverse=True)
    missing, early, digest = set(due), dict[str, Tensor](), hashlib.sha256()
    for spec, tensor in whole:
        parts = to_hf(config, spec, tensor)
        if not missing.issuperset(parts):
            raise ValueError(f"{spec.name} came twice or does not belong to {config.name}")
        missing.difference_update(parts)
        early.update(parts)
        while due and due[-1] in early:
            _update(digest, due[-1], early.pop(due.pop()))
    if missing:
        raise ValueError(f"{min(missing)} is missing from the parameters")
    return digest.hexdigest()


def _draw(config: ModelConfig, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the fresh fp32 Hugging Face tensor ``name``."""
    if len(shape) == 1:
        return torch.ones(shape)
    init = config.init
    if name.endswith(RESIDUAL_OUTPUTS):
        deviation = init.residual_output
        if init.residual_scaling == "sqrt-2-layers":
            deviation /= math.sqrt(2 * config.arch.num_hidden_layers)
    else:
        deviation = init.embedding if name == "model.embed_tokens.weight" else init.linear
    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little", signed=True))
    return torch.randn(shape, generator=generator, dtype=torch.float32).mul_(deviation)


def _update(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    values = tensor.detach().to("cpu", torch.float32).contiguous().numpy().astype("<f4", copy=False)
    digest.update(name.encode("ascii"))
    digest.update(str(tuple(tensor.shape)).encode("ascii"))
    digest.update(values.reshape(-1).view("u1").data)
