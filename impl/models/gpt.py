"""Qwen3 and LLaMA as megatron-core's ``GPTModel``, on a CPU as on a GPU, through its extension points only.

Three parts of the stock local spec need CUDA and are replaced: the core attention (a submodule of the layer spec), the
rotary embedding (a subclass) and the loss (a method).  Megatron's global state, RNG tracker, recompute and
distributed optimizer are not used; process groups are passed explicitly.  The same code serves megatron-core 0.16.1
and 0.19.2: every name, argument and parameter order used here is alike in both.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from impl.models.catalogue import ModelConfig, Part
from impl.models.cross_entropy import vocabulary_parallel_cross_entropy
from impl.models.deferred_compile import deferred_compile


@contextlib.contextmanager
def _without_megatrons_warnings() -> Iterator[None]:
    """Leave out Megatron's own warnings: on every rank, of parts that are not used here (Apex, CUDA graphs)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        yield


with _without_megatrons_warnings(), deferred_compile():
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_config import TransformerConfig

_TENSOR_PARALLEL_GROUPS = {"tp", "mp", "tp_cp", "tp_dp_cp", "expt_tp", "tp_ep", "tp_ep_pp"}


class SDPACoreAttention(MegatronModule):
    """Causal attention by ``torch``'s scaled dot product: ``[s, b, heads, d]`` to ``[s, b, heads * d]``.

    The kernel that ``transformers`` calls too, on every device.  No dropout, no packed sequences.
    """

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.recompute = False
        """Whether the backward runs the attention again instead of keeping its intermediate results."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> Tensor:
        """Return the attended values ``[s, b, heads * d]``; ``key`` and ``value`` may have fewer heads."""
        if attention_mask is not None or packed_seq_params is not None:
            raise NotImplementedError("only the causal mask over whole sequences is supported")
        if self.recompute and torch.is_grad_enabled():
            # no dropout, so there is no generator state to restore
            return checkpoint(self._attend, query, key, value, use_reentrant=False, preserve_rng_state=False)
        return self._attend(query, key, value)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        grouped = q.size(1) != k.size(1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)


class DeviceRotary(RotaryEmbedding):
    """Rotary embedding that computes its fp32 angles on the CPU and puts them on ``device``, whichever that is."""

    def __init__(self, kv_channels: int, rotary_base: float, cp_group: dist.ProcessGroup, device: torch.device) -> None:
        # rotary_base is declared int but only ever a base of powers
        super().__init__(
            kv_channels,
            rotary_percent=1.0,
            rotary_base=rotary_base,  # type: ignore[arg-type]
            use_cpu_initialization=True,
            cp_group=cp_group,
        )
        self.device = device

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Return the angles ``[max_seq_len, 1, 1, d]`` of positions ``offset`` onwards."""
        angles = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :].to(self.device)


class _NumberedLayers(nn.ModuleList):
    """The layers of a pipeline stage, under their numbers in the whole model."""

    def __init__(self, layers: Iterable[nn.Module], first: int) -> None:
        super().__init__()
        for number, layer in enumerate(layers, start=first):
            self.add_module(str(number), layer)


class PortableGPT(GPTModel):
    """The model of ``catalogued``, or the ``part`` of it that one pipeline stage holds.

    Its ``named_parameters()`` are ``catalogued.parameters(tp, part)``, as shards, in that order.
    """

    def __init__(
        self,
        catalogued: ModelConfig,
        config: TransformerConfig,
        groups: ProcessGroupCollection,
        device: torch.device,
        part: Part,
    ) -> None:
        arch = catalogued.arch
        super().__init__(
            config=config,
            transformer_layer_spec=_layer_spec(arch.qk_norm),
            vocab_size=catalogued.padded_vocab(groups.tp.size()),
            max_sequence_length=arch.max_position_embeddings,
            share_embeddings_and_output_weights=arch.tie_word_embeddings,
            position_embedding_type="rope",
            pg_collection=groups,
            pre_process=part.embedding,
            post_process=part.head,
        )
        self.catalogued, self.part = catalogued, part
        if part.first:
            self.decoder.layers = _NumberedLayers(self.decoder.layers, part.first)
        self.rotary_pos_emb = DeviceRotary(arch.head_dim, arch.rope_parameters.rope_theta, groups.cp, device)

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the loss ``[b, s]`` of ``labels [b, s]`` under this rank's ``logits [s, b, columns]``."""
        target = labels.transpose(0, 1).contiguous()
        vocabulary = self.catalogued.arch.vocab_size
        return vocabulary_parallel_cross_entropy(logits, target, vocabulary, self.pg_collection.tp).transpose(0, 1)


def build_model(
    config: ModelConfig,
    tp_group: dist.ProcessGroup,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    part: Part | None = None,
) -> PortableGPT:
    """Return this tensor-parallel rank's part of the model, with weights not initialised.

    part: of a pipeline stage; by default the whole model.

    Every rank of ``tp_group`` must call (ranks do not wait for each other).  ``dtype`` is that of all parameters.
    The device ``meta`` gives shapes only.  Raises :class:`ConfigError` if the group's size does not fit the model.
    """
    config.check(tp_group.size())
    device, part = torch.device(device), part or config.whole()
    with device, _without_megatrons_warnings():
        settings = _transformer_config(config, tp_group.size(), dtype, part.layers)
        model = PortableGPT(config, settings, _groups(tp_group), device, part)
    model.to(dtype=dtype)  # Megatron leaves norms in fp32
    _check_layout(model, config, tp_group.size())
    return model


def loss(model: PortableGPT, tokens: Tensor) -> Tensor:
    """Return the scalar fp32 mean cross-entropy of predicting each token from those before it.

    tokens: ``[b, s + 1]`` int64, identical on all tensor-parallel ranks, which must all call.  Gradients are complete
    on each rank except for parameters that are ``partial_over_tp``, which must be summed over the group.
    """
    if tokens.device.type == "cpu":  # on a GPU the check would wait for the device: check before moving them there
        check_tokens(tokens, model.catalogued)
    return model(input_ids=tokens[:, :-1], position_ids=None, attention_mask=None, labels=tokens[:, 1:]).mean()


def forward_stage(model: PortableGPT, hidden: Tensor | None, tokens: Tensor | None) -> Tensor:
    """Return what a pipeline stage makes of ``hidden``: hidden states ``[s, b, h]``, on the last stage the mean loss.

    hidden: what the stage before returned; None on the first stage, which starts from ``tokens``.
    tokens: ``[b, s + 1]`` as in :func:`loss`, on the first and the last stage; None in between.

    All tensor-parallel ranks must call.
    """
    first, last = model.pre_process, model.post_process
    if (first or last) == (tokens is None) or first != (hidden is None):
        raise ValueError("the first stage takes tokens, the last takes tokens too, all others take hidden states")
    ids = labels = None
    if tokens is not None:
        if tokens.device.type == "cpu":
            check_tokens(tokens, model.catalogued)
        ids, labels = tokens[:, :-1] if first else None, tokens[:, 1:] if last else None
    if hidden is not None:
        model.set_input_tensor(hidden)
    # Megatron declares ids as required, but a stage without embedding does not read them
    out = model(input_ids=ids, position_ids=None, attention_mask=None, labels=labels)
    if hidden is not None:
        model.decoder.input_tensor = None  # or the module would keep the graph of this call alive
    return out.mean() if last else out


def recompute_attention(model: PortableGPT, recompute: bool) -> None:
    """Let backwards run the core attention again instead of keeping its intermediate results, or stop it."""
    for module in model.modules():
        if isinstance(module, SDPACoreAttention):
            module.recompute = recompute


def check_tokens(tokens: Tensor, config: ModelConfig) -> None:
    """Raise ``ValueError`` if a token id is not in the vocabulary: Megatron's layers would take it for another one."""
    vocabulary = config.arch.vocab_size
    if tokens.min() < 0 or tokens.max() >= vocabulary:
        raise ValueError(f"token ids must lie in 0..{vocabulary - 1}, found {int(tokens.min())}..{int(tokens.max())}")


@torch.no_grad()
def logits(model: PortableGPT, tokens: Tensor) -> Tensor:
    """Return the logits ``[b, s, vocabulary]`` of ``tokens [b, s]``, padding removed, without a gradient.

    Collective over the tensor-parallel group.
    """
    local = model(input_ids=tokens, position_ids=None, attention_mask=None).contiguous()
    group = model.pg_collection.tp
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts, dim=-1)[..., : model.catalogued.arch.vocab_size]


def _layer_spec(qk_norm: bool) -> ModuleSpec:
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    submodules: Any = spec.submodules
    submodules.self_attention.submodules.core_attention = SDPACoreAttention
    return spec


def _transformer_config(config: ModelConfig, tp: int, dtype: torch.dtype, layers: int) -> TransformerConfig:
    arch = config.arch
    settings = TransformerConfig(
        num_layers=max(layers, 1),
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.intermediate_size,
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=arch.num_key_value_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        qk_layernorm=arch.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        # Megatron's faster embedding backward is not deterministic on a GPU
        deterministic_mode=torch.are_deterministic_algorithms_enabled() and torch.cuda.is_available(),
        use_cpu_initialization=True,  # no device named in Megatron's allocations: ours applies
        perform_initialization=False,  # impl.models.weights draws the same values under every TP degree
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # fusions need CUDA, or torch.compile on a CPU, and change rounding
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    settings.num_layers = layers  # it divides by the number in a deviation that nothing here uses
    return settings


def _groups(tp_group: dist.ProcessGroup) -> ProcessGroupCollection:
    """Return Megatron's groups: ``tp_group`` where tensor parallelism counts, and this rank alone elsewhere."""
    alone = tp_group
    if tp_group.size() > 1:
        # only this rank takes part, so nobody waits; the other ranks make their own
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    groups = ProcessGroupCollection()
    for field in fields(ProcessGroupCollection):
        # hcp is a list in every version; it is for hierarchical context parallelism only
        value = [alone] if field.name == "hcp" else tp_group if field.name in _TENSOR_PARALLEL_GROUPS else alone
        setattr(groups, field.name, value)
    return groups


def _check_layout(model: PortableGPT, config: ModelConfig, tp: int) -> None:
    """Raise RuntimeError if another megatron-core version registers other parameters than the catalogue says."""
    built = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    expected = [(spec.name, spec.local_shape(tp)) for spec in config.parameters(tp, model.part)]
    if built != expected:
        a, b = next(((a, b) for a, b in zip(built, expected, strict=False) if a != b), (len(built), len(expected)))
        raise RuntimeError(f"this megatron-core version lays {config.name} out otherwise: {a} where {b} was expected")
