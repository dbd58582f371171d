"""Small models and their ``transformers`` twins, shared by the tests of one and of several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from impl.models import catalogue
from impl.models.catalogue import ModelConfig
from impl.models.hf_layout import to_hf

# odd enough to catch mix-ups: grouped queries, head_dim * heads != hidden size, a vocabulary that needs padding
_SHAPE = {"num_hidden_layers": 2, "hidden_size": 48, "vocab_size": 200, "head_dim": 16}


def variant(name: str, **fields: object) -> ModelConfig:
    """Return the catalogue's model ``name`` with other ``transformers`` fields."""
    data = catalogue.load(name).model_dump()
    data["transformers"].update(fields)
    if data["transformers"]["tie_word_embeddings"]:
        # the embedding is the head too: at 0.5 logits reach 25, where neighbouring fp32 numbers are 2e-6 apart
        data["init"]["embedding"] = 0.06
    return ModelConfig(**data)


CASES = {
    "qwen3-tied": variant("qwen3-tiny", **_SHAPE, tie_word_embeddings=True),
    "qwen3-untied": variant("qwen3-tiny", **_SHAPE),
    "llama-tied": variant("llama-tiny", **{**_SHAPE, "head_dim": 12}, tie_word_embeddings=True),
    "llama-grouped": variant("llama-tiny", **_SHAPE, num_key_value_heads=2),
}


def tokens(config: ModelConfig, seed: int = 0, batch: int = 3, length: int = 33) -> Tensor:
    """Return random token ids ``[batch, length]``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.arch.vocab_size, (batch, length), generator=generator)


def hf_twin(config: ModelConfig, whole, dtype: torch.dtype = torch.float32):
    """Return ``transformers``' model with the ``whole`` parameters of ours."""
    import transformers  # here, because ranks that import this module do without its seconds

    model = transformers.AutoModelForCausalLM.from_config(config.hf_config(), attn_implementation="sdpa").to(dtype)
    state = {name: t for spec, w in whole for name, t in to_hf(config, spec, w).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert set(missing) <= ({"lm_head.weight"} if config.arch.tie_word_embeddings else set())
    return model


def hf_loss(model, ids: Tensor) -> Tensor:
    """Return the mean cross-entropy of next tokens, by ``torch``'s own function."""
    out = model(ids[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(out.flatten(0, 1), ids[:, 1:].flatten())


def hf_gradients(model, ids: Tensor) -> dict[str, Tensor]:
    """Return the gradient of every parameter of ``model`` by name."""
    model.zero_grad()
    hf_loss(model, ids).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def relative(a: Tensor, b: Tensor) -> float:
    """Return the norm of ``a - b`` over that of ``b``, in float64."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
