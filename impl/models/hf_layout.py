"""Which Hugging Face tensors make up each Megatron parameter, and how.

Megatron fuses query, key and value projections (rows grouped by KV head) and gate and up projections, and pads the
vocabulary; ``transformers`` names and keeps them apart, without padding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from impl.models.catalogue import ModelConfig
from impl.models.parameters import ParamSpec

_LAYERS = "decoder.layers."
_TABLES = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}
_QKV = "self_attention.linear_qkv.weight"
_FC1 = "mlp.linear_fc1.weight"
_IN_LAYER = {
    "input_layernorm.weight": ("input_layernorm.weight",),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight",),
    _QKV: ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight",),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight",),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight",),
    _FC1: ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight",),
}
RESIDUAL_OUTPUTS = (".o_proj.weight", ".down_proj.weight")


def hf_names(spec: ParamSpec) -> tuple[str, ...]:
    """Return the names of the Hugging Face tensors in ``spec``, in the order in which they are stacked."""
    if spec.name in _TABLES:
        return (_TABLES[spec.name],)
    if spec.name == "decoder.final_layernorm.weight":
        return ("model.norm.weight",)
    number, rest = _in_layer(spec)
    return tuple(f"model.layers.{number}.{name}" for name in _IN_LAYER[rest])


def unpadded(config: ModelConfig, spec: ParamSpec) -> tuple[int, ...]:
    """Return the shape of the whole parameter without vocabulary padding, whatever tensor-parallel degree padded it."""
    return (config.arch.vocab_size, *spec.shape[1:]) if spec.name in _TABLES else spec.shape


def hf_shapes(config: ModelConfig, spec: ParamSpec) -> dict[str, tuple[int, ...]]:
    """Return the shape of each Hugging Face tensor in ``spec``, padding left out."""
    arch, named = config.arch, hf_names(spec)
    if spec.name in _TABLES:
        return {named[0]: (arch.vocab_size, arch.hidden_size)}
    if spec.name.endswith(_QKV):
        heads = (arch.num_attention_heads, arch.num_key_value_heads, arch.num_key_value_heads)
        return {name: (n * arch.head_dim, arch.hidden_size) for name, n in zip(named, heads, strict=True)}
    if spec.name.endswith(_FC1):
        return dict.fromkeys(named, (arch.intermediate_size, arch.hidden_size))
    return {named[0]: spec.shape}


def to_hf(config: ModelConfig, spec: ParamSpec, whole: Tensor) -> dict[str, Tensor]:
    """Return the Hugging Face tensors of the whole parameter ``whole``; may share its memory."""
    named = hf_names(spec)
    if spec.name in _TABLES:
        return {named[0]: whole[: config.arch.vocab_size]}
    if spec.name.endswith(_QKV):
        groups, parts = _qkv(config)
        grouped = whole.view(groups, sum(parts), config.arch.hidden_size)
        pieces = [p.reshape(-1, config.arch.hidden_size) for p in grouped.split(parts, dim=1)]
        return dict(zip(named, pieces, strict=True))
    if spec.name.endswith(_FC1):
        return dict(zip(named, whole.chunk(2), strict=True))
    return {named[0]: whole}


def from_hf(config: ModelConfig, spec: ParamSpec, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the whole parameter made of the Hugging Face ``tensors``; inverse of :func:`to_hf`, padding is zero."""
    stacked = [tensors[name] for name in hf_names(spec)]
    if spec.name in _TABLES:
        padding = stacked[0].new_zeros(spec.shape[0] - stacked[0].size(0), spec.shape[1])
        return torch.cat((stacked[0], padding))
    if spec.name.endswith(_QKV):
        groups, parts = _qkv(config)
        pieces = [t.view(groups, n, config.arch.hidden_size) for t, n in zip(stacked, parts, strict=True)]
        return torch.cat(pieces, dim=1).view(spec.shape)
    return torch.cat(stacked)


def _in_layer(spec: ParamSpec) -> tuple[int, str]:
    number, _, rest = spec.name.removeprefix(_LAYERS).partition(".")
    if not spec.name.startswith(_LAYERS) or rest not in _IN_LAYER:
        raise ValueError(f"{spec.name} has no counterpart in transformers")
    return int(number), rest


def _qkv(config: ModelConfig) -> tuple[int, list[int]]:
    """Return the number of KV groups, and the rows of query, key and value in each."""
    arch = config.arch
    queries = arch.num_attention_heads // arch.num_key_value_heads
    return arch.num_key_value_heads, [queries * arch.head_dim, arch.head_dim, arch.head_dim]
