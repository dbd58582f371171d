"""The model catalogue: exact parameter shapes from one YAML file per model.

A file in ``experiments/models/`` holds the fields of a ``transformers`` configuration object.  Shapes, order and
tensor-parallel cuts are arithmetic on these fields, so that planning needs neither torch nor ``transformers``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from impl.errors import ConfigError, unknown
from impl.models.parameters import ParamSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "models"
VOCABULARY_MULTIPLE = 128  # Megatron's make-vocab-size-divisible-by, per tensor-parallel rank


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Rope(_Frozen):
    """Rotary position embedding: only the plain rule, angles ``position * theta^(-2i/d)``."""

    rope_type: Literal["default"] = "default"
    rope_theta: float = Field(gt=0)


class Architecture(_Frozen):
    """Fields of the ``transformers`` configuration class ``config_class``, under their names there."""

    config_class: Literal["Qwen3Config", "LlamaConfig"]
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, multiple_of=2)
    max_position_embeddings: int = Field(gt=0)
    rms_norm_eps: float = Field(gt=0)
    rope_parameters: Rope
    tie_word_embeddings: bool

    @model_validator(mode="after")
    def _whole_groups(self) -> Architecture:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} attention heads are not a multiple of {self.num_key_value_heads} KV heads"
            )
        return self

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head (Qwen3)."""
        return self.config_class == "Qwen3Config"

    def fields(self) -> dict[str, Any]:
        """Return the keyword arguments of the configuration class, as plain data."""
        return self.model_dump(exclude={"config_class"})


class Init(_Frozen):
    """Standard deviations of the normal distributions that fresh weights are drawn from; norms start at one.

    residual_output: of the two matrices that write into the residual stream (``o_proj``, ``down_proj``).
    residual_scaling: ``sqrt-2-layers`` divides ``residual_output`` by the square root of twice the number of layers.
    """

    linear: float = Field(gt=0)
    residual_output: float = Field(gt=0)
    residual_scaling: Literal["none", "sqrt-2-layers"]
    embedding: float = Field(gt=0)


class Part(_Frozen):
    """A contiguous part of a model, as one pipeline stage holds it: layers ``first`` to ``last``, exclusive.

    embedding, head: whether the word embedding, or final norm and output layer, belong to it too.
    """

    first: int = Field(ge=0)
    last: int = Field(ge=0)
    embedding: bool
    head: bool

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.last - self.first


class ModelConfig(_Frozen):
    """One model: its architecture, initialisation and the source of the figures.  Immutable and hashable."""

    id: str = Field(pattern=r"^[a-z0-9.-]+$")
    display_name: str
    source: str
    transformers: Architecture
    init: Init

    @property
    def name(self) -> str:
        """Identifier on command lines and in paths."""
        return self.id

    @property
    def arch(self) -> Architecture:
        """The architecture; shorter than ``.transformers`` in formulas."""
        return self.transformers

    def hf_config(self) -> PretrainedConfig:
        """Return the ``transformers`` configuration object (imports ``transformers``, seconds)."""
        import transformers

        cls = getattr(transformers, self.arch.config_class)
        model_class = self.arch.config_class.removesuffix("Config") + "ForCausalLM"
        return cls(**self.arch.fields(), architectures=[model_class], initializer_range=self.init.linear)

    def padded_vocab(self, tp: int) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple of ``128 * tp`` (Megatron's rule)."""
        multiple = VOCABULARY_MULTIPLE * tp
        return -(-self.arch.vocab_size // multiple) * multiple

    def parameter_count(self) -> int:
        """Trainable elements, vocabulary padding left out and tied embeddings counted once."""
        padding = (self.padded_vocab(1) - self.arch.vocab_size) * self.arch.hidden_size
        tables = 1 if self.arch.tie_word_embeddings else 2
        return sum(p.numel for p in self.parameters(1)) - tables * padding

    def check(self, tp: int) -> None:
        """Raise :class:`ConfigError` unless ``tp`` tensor-parallel ranks can share the heads and the MLP width."""
        a = self.arch
        widths = {
            "attention heads": a.num_attention_heads,
            "KV heads": a.num_key_value_heads,
            "MLP columns": a.intermediate_size,
        }
        common = math.gcd(*widths.values())
        for what, n in widths.items():
            if tp < 1 or n % tp:
                fits = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
                raise ConfigError(f"{self.name}: TP={tp} does not divide {n} {what}; use one of {fits}")

    def whole(self) -> Part:
        """Return the part that is the whole model."""
        return Part(first=0, last=self.arch.num_hidden_layers, embedding=True, head=True)

    def parameters(self, tp: int, part: Part | None = None) -> tuple[ParamSpec, ...]:
        """Return every parameter in the order of the Megatron model's ``named_parameters()``.

        ``tp`` decides only the vocabulary padding; shapes are those of whole tensors.

        part: the parameters of this pipeline stage alone, under their names in the whole model.

        Raises :class:`ConfigError` if ``tp`` does not fit the model.
        """
        self.check(tp)
        a, table = self.arch, (self.padded_vocab(tp), self.arch.hidden_size)
        part = part or self.whole()
        specs = [ParamSpec("embedding.word_embeddings.weight", table, tp_dim=0)] if part.embedding else []
        for layer in range(part.first, part.last):
            specs += self._layer(f"decoder.layers.{layer}.")
        if part.head:
            specs.append(ParamSpec("decoder.final_layernorm.weight", (a.hidden_size,)))
            if not a.tie_word_embeddings:
                specs.append(ParamSpec("output_layer.weight", table, tp_dim=0))
        return tuple(specs)

    def _layer(self, prefix: str) -> Iterator[ParamSpec]:
        """Yield one layer's parameters in the order in which Megatron's local spec registers them."""
        a = self.arch
        h, f, d = a.hidden_size, a.intermediate_size, a.head_dim
        queries, keys = a.num_attention_heads * d, a.num_key_value_heads * d
        attention, mlp = f"{prefix}self_attention.", f"{prefix}mlp."
        yield ParamSpec(f"{prefix}input_layernorm.weight", (h,))
        yield ParamSpec(f"{attention}linear_proj.weight", (h, queries), tp_dim=1)
        # rows are grouped by KV head, [its queries | key | value], so that any whole number of groups is contiguous
        yield ParamSpec(f"{attention}linear_qkv.weight", (queries + 2 * keys, h), tp_dim=0)
        if a.qk_norm:
            yield ParamSpec(f"{attention}q_layernorm.weight", (d,), partial_over_tp=True)
            yield ParamSpec(f"{attention}k_layernorm.weight", (d,), partial_over_tp=True)
        yield ParamSpec(f"{prefix}pre_mlp_layernorm.weight", (h,))
        yield ParamSpec(f"{mlp}linear_fc1.weight", (2 * f, h), tp_dim=0, blocks=(f, f))
        yield ParamSpec(f"{mlp}linear_fc2.weight", (h, f), tp_dim=1)


def names(folder: Path = FOLDER) -> list[str]:
    """Return the identifiers of all models in ``folder``, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load(name: str, layers: int | None = None, folder: Path = FOLDER) -> ModelConfig:
    """Return the model ``name``, with ``layers`` layers instead of its own number if given.

    Raises :class:`ConfigError` for an unknown name (with the nearest one), an invalid file or ``layers`` below 1.
    """
    known = names(folder)
    if name not in known:
        raise unknown("model", name, known)
    path = folder / f"{name}.yaml"
    try:
        data = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not plain YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a mapping of settings")
    if data.get("id") != name:
        raise ConfigError(f"{path}: id must be {name!r}, as in the file's name, not {data.get('id')!r}")
    if layers is not None:
        if layers < 1:
            raise ConfigError(f"{name}: layers must be at least 1, not {layers}")
        if isinstance(data.get("transformers"), dict):
            data["transformers"]["num_hidden_layers"] = layers
    return _parse(data, path)


def _parse(data: dict[str, Any], path: Path) -> ModelConfig:
    try:
        return ModelConfig(**data)
    except ValidationError as error:
        first = error.errors()[0]
        *parents, last = (str(x) for x in first["loc"]) if first["loc"] else ("",)
        if first["type"] == "extra_forbidden":
            cls = {"transformers": Architecture, "init": Init, "rope_parameters": Rope}.get(
                parents[-1] if parents else "", ModelConfig
            )
            raise ConfigError(f"{path}: {unknown('setting', last, cls.model_fields)}") from None
        where = ".".join((*parents, last))
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{path}: {where}: {message}") from None
