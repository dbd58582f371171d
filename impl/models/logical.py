"""The matrices inside fused ones: what Megatron's layout of a layer says about its rows, the same under every TP."""

from __future__ import annotations

import dataclasses

from impl.models.catalogue import ModelConfig
from impl.models.parameters import Fragment, ParamSpec


def split(spec: ParamSpec, config: ModelConfig, *, heads: bool = False) -> ParamSpec:
    """Return ``spec`` with the fragments of a fused QKV or gate/up matrix, any other parameter as it is.

    heads: every attention head is a matrix of its own instead of all queries, all keys and all values.
    """
    if spec.name.endswith("self_attention.linear_qkv.weight"):
        return dataclasses.replace(spec, fragments=_qkv(config, heads))
    if spec.name.endswith("mlp.linear_fc1.weight"):
        width = config.arch.intermediate_size
        return dataclasses.replace(
            spec, fragments=(Fragment("gate", ((0, width),)), Fragment("up", ((width, 2 * width),)))
        )
    return spec


def _qkv(config: ModelConfig, heads: bool) -> tuple[Fragment, ...]:
    """Rows are grouped by KV head, each group its queries, its key, its value (as the catalogue lays them out)."""
    groups, d = config.arch.num_key_value_heads, config.arch.head_dim
    queries = config.arch.num_attention_heads // groups
    of: dict[str, list[tuple[int, int]]] = {"q": [], "k": [], "v": []}
    for group in range(groups):
        start = group * (queries + 2) * d
        for place in range(queries + 2):
            kind = "q" if place < queries else ("k", "v")[place - queries]
            of[kind].append((start + place * d, start + (place + 1) * d))
    if heads:
        return tuple(Fragment(f"{k}.{n}", (rows,)) for k, ranges in of.items() for n, rows in enumerate(ranges))
    return tuple(Fragment(kind, tuple(ranges)) for kind, ranges in of.items())
