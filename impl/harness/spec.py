"""The run spec: everything that decides a training run, validated before any process starts."""

from __future__ import annotations

import contextlib
import hashlib
import json
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from impl.canzona.strategies import PlanOptions
from impl.errors import ConfigError, unknown


class Frozen(BaseModel):
    """Base of all specs: immutable, unknown keys and numbers that are not finite refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataSpec(Frozen):
    """Where tokens come from.

    source: ``embedded`` (the text file of this repository), a path to a local text, parquet or jsonl file or folder, or
        the name of a Hugging Face dataset.
    tokenizer: ``bytes``, or the name or folder of a ``transformers`` tokenizer.
    """

    source: str = "embedded"
    subset: str | None = None
    split: str = "train"
    text_field: str = "text"
    tokenizer: str = "bytes"
    heldout_sequences: int = Field(default=64, gt=0)


class ScheduleSpec(Frozen):
    """Learning-rate schedule: linear warm-up, then cosine down to ``final_fraction`` of the peak."""

    warmup_steps: int = Field(default=20, ge=0)
    final_fraction: float = Field(default=0.1, ge=0.0, le=1.0)


class RuntimeSpec(Frozen):
    """How the run executes; nothing here changes what is computed, except ``deterministic`` and ``device``.

    collective_timeout_s: a collective that takes longer fails the run.
    threads: OMP threads of a rank process.
    heartbeat_s: seconds between two progress lines.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(default=1, gt=0)
    collective_timeout_s: float = Field(default=30.0, gt=0)
    deterministic: bool = True
    heartbeat_s: float = Field(default=2.0, gt=0)


MOST_SKIPS = 3
"""A training that skips more steps in a row than this has diverged, unless it is told otherwise."""
_LATER = {"resume_from": None, "offload_state": False, "health_every": 50, "max_skips": MOST_SKIPS}
_LATER_IN_PLAN = {"split": "none", "split_qkv": "matrices"}
"""Settings that came later: where they have these values, runs keep the names that they had without them."""


class RunSpec(Frozen):
    """One training run.

    batch: sequences per step over all DP ranks; microbatches: into how many each rank's share is accumulated.
    clip: global gradient-norm limit, 0 for none; scope and exceptions in docs/numbers.md.
    reduction: ``native`` (the backend's order) or ``rank-order`` (the same sum under every bucket layout).
    optimizer: for matrices; everything else uses AdamW.  ``optimizer_settings``/``adamw_settings`` are their
        hyper-parameters.
    frozen: parameters that are not trained, as glob patterns over Megatron names.
    offload_state: keep optimizer state in host memory between steps; the results are the same.
    health_every: steps between two measurements of the optimizers' health, 0 for none.
    max_skips: a step whose gradients are not finite is skipped; one more than this in a row is a divergence.
    resume_from: folder of another run, or of one of its checkpoints, whose state this one goes on from; it may have
        another mesh, strategy and reduction (docs/checkpoints.md).
    """

    model: str
    strategy: str = "canzona"
    optimizer: str = "muon"
    dp: int = Field(default=1, gt=0)
    tp: int = Field(default=1, gt=0)
    steps: int = Field(default=20, gt=0)
    seed: int = Field(default=0, ge=0)
    batch: int = Field(default=16, gt=0)
    sequence: int = Field(default=48, gt=0)
    microbatches: int = Field(default=1, gt=0)
    lr: float = Field(default=2e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    clip: float = Field(default=1.0, ge=0)
    dtype: Literal["float32", "bfloat16"] = "float32"
    reduction: Literal["native", "rank-order"] = "native"
    layers: int | None = Field(default=None, gt=0)
    frozen: tuple[str, ...] = ()
    eval_every: int = Field(default=20, ge=0)
    checkpoint_every: int = Field(default=0, ge=0)
    init_from: str | None = None
    resume_from: str | None = None
    offload_state: bool = False
    health_every: int = Field(default=50, ge=0)
    max_skips: int = Field(default=MOST_SKIPS, ge=0)
    schedule: ScheduleSpec = ScheduleSpec()
    data: DataSpec = DataSpec()
    plan: PlanOptions = PlanOptions()
    optimizer_settings: dict[str, Any] = Field(default_factory=dict)
    adamw_settings: dict[str, Any] = Field(default_factory=dict)
    runtime: RuntimeSpec = RuntimeSpec()

    @property
    def world_size(self) -> int:
        """Number of rank processes."""
        return self.dp * self.tp

    @property
    def local_batch(self) -> int:
        """Sequences of one microbatch on one DP rank."""
        return self.batch // (self.dp * self.microbatches)

    @model_validator(mode="after")
    def _divides(self) -> RunSpec:
        if self.batch % (self.dp * self.microbatches):
            raise ValueError(
                f"batch {self.batch} is not a multiple of dp x microbatches ({self.dp} x {self.microbatches})"
            )
        return self

    def resolved(self) -> dict[str, Any]:
        """Return every setting as plain data, defaults included."""
        return self.model_dump(mode="json")

    @property
    def digest(self) -> str:
        """SHA-256 of the settings that decide the result: independent of key order, ``runtime`` timings excluded."""
        data = self.resolved()
        data["runtime"] = {k: data["runtime"][k] for k in ("device", "deterministic", "threads")}
        for settings, later in ((data, _LATER), (data["plan"], _LATER_IN_PLAN)):
            for key, default in later.items():
                if settings[key] == default:
                    del settings[key]
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


Spec = typing.TypeVar("Spec", bound=BaseModel)


def parse(cls: type[Spec], data: dict[str, Any], where: str = "") -> Spec:
    """Return ``cls`` from plain data; raises :class:`ConfigError` with one line that names the key and a near one."""
    _check_keys(cls, data, where)
    try:
        return cls(**data)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(x) for x in (where, *first["loc"]) if x != "")
        if first["type"] == "extra_forbidden" and (model := _model_at(cls, first["loc"][:-1])) is not None:
            inside = key.rpartition(".")[0]
            raise unknown(f"setting of {inside}", str(first["loc"][-1]), model.model_fields) from None
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"{key}: {message}" + (f" (got {first['input']!r})" if first["loc"] else "") if key else message
        ) from None


def _check_keys(cls: type[BaseModel], data: Any, where: str) -> None:
    if not isinstance(data, dict):
        raise ConfigError(f"{where or 'configuration'}: expected a mapping of settings, got {data!r}")
    for key, value in data.items():
        if key not in cls.model_fields:
            raise unknown(f"setting{' of ' + where if where else ''}", str(key), cls.model_fields)
        inner = _model_of(cls.model_fields[key].annotation)
        if inner is not None and not isinstance(value, inner):
            _check_keys(inner, value, f"{where}.{key}" if where else key)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    return next((a for a in options if isinstance(a, type) and issubclass(a, BaseModel)), None)


def _model_at(cls: type[BaseModel], path: Sequence[int | str]) -> type[BaseModel] | None:
    """Return the model at ``path`` inside ``cls``, through lists and mappings; None if there is none."""
    found: Any = cls
    for step in path:
        if isinstance(found, type) and issubclass(found, BaseModel):
            found = found.model_fields[str(step)].annotation if str(step) in found.model_fields else None
            found = _model_of(found) or found
        else:  # of a list or a mapping: the type of what is in it
            inner = [a for a in typing.get_args(found) if a is not Ellipsis]
            found = inner[-1] if inner else None
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def load_yaml(path: str | Path) -> Any:
    """Return the data of a YAML (or JSON) file; only plain data, no objects.  Raises :class:`ConfigError`."""
    try:
        return yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not plain YAML: {str(error).splitlines()[0]}") from None


def assign(data: dict[str, Any], assignment: str) -> None:
    """Apply ``key.sub=value`` to nested plain data in place; the value is read as YAML (``false`` is false)."""
    key, equals, text = assignment.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {assignment!r}: write key=value, for example --set plan.alpha=0.5")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if isinstance(value, str):  # YAML 1.1 reads 4e-3 as a string
        with contextlib.suppress(ValueError):
            value = float(value)
    *parents, last = key.split(".")
    node: Any = data
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {assignment!r}: {parent} is not a group of settings")
    node[last] = value
