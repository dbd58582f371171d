"""Reading and writing model folders of Hugging Face ``transformers``: ``config.json`` and safetensors, never pickle."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from impl.errors import ConfigError
from impl.models.catalogue import ModelConfig
from impl.models.hf_layout import from_hf, hf_shapes, to_hf
from impl.models.parameters import ParamSpec
from impl.models.sharding import shard

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 2**30
_DECISIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "tie_word_embeddings",
    "hidden_act",
    "attention_bias",
)


def check_hf(folder: str | Path, config: ModelConfig) -> dict[str, Path]:
    """Return the file of each tensor of a Hugging Face folder that fits ``config``; reads no tensor.

    Raises :class:`ConfigError` as :func:`load_hf` does.
    """
    folder = Path(folder)
    _check_config(folder, config)
    files = _tensor_files(folder)
    wanted = {name: shape for spec in config.parameters(1) for name, shape in hf_shapes(config, spec).items()}
    _check_tensors(folder, files, wanted, tied=config.arch.tie_word_embeddings)
    return files


@torch.no_grad()
def load_hf(folder: str | Path, model: nn.Module, config: ModelConfig, tp_rank: int, tp: int) -> None:
    """Fill ``model``, the part of tensor-parallel rank ``tp_rank`` of ``tp``, from a Hugging Face folder.

    One whole parameter is in memory at a time, and is converted to the model's type.  No communication.

    Raises :class:`ConfigError`, before the model is touched, if ``config.json`` describes another architecture, if
    there are no safetensors, or if a tensor is missing, misshapen or unknown; its name is in the message.
    """
    files = check_hf(folder, config)
    specs = config.parameters(tp)
    local = dict(model.named_parameters())
    for spec in specs:
        tensors = {name: _read(files[name], name) for name in hf_shapes(config, spec)}
        local[spec.name].copy_(shard(from_hf(config, spec, tensors), spec, tp, tp_rank))


def save_hf(
    folder: str | Path,
    config: ModelConfig,
    whole: Iterable[tuple[ParamSpec, Tensor]],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the ``whole`` parameters as a folder that ``transformers``' ``from_pretrained`` loads.

    One rank calls, with its :func:`~impl.models.weights.whole_parameters`; the other tensor-parallel ranks must run
    theirs to the end meanwhile.  Files hold up to ``shard_bytes`` (a larger tensor has its own), which is also the
    memory needed.  The folder appears at once, complete; it must not exist or be empty, else :class:`ConfigError`.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already; give the name of a new folder")
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)  # left by an interrupted run
    part.mkdir(parents=True)
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    total, dtype = 0, torch.float32

    def flush() -> None:
        save_file(pending, part / f"{len(files)}.tmp", metadata={"format": "pt"})
        files.append(list(pending))
        pending.clear()

    for spec, parameter in whole:
        for name, tensor in to_hf(config, spec, parameter).items():
            held = sum(t.nbytes for t in pending.values())
            if pending and held + tensor.nbytes > shard_bytes:
                flush()
            # a copy, because safetensors refuses shared memory and the model may change before it is written
            pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
            total, dtype = total + tensor.nbytes, tensor.dtype
    flush()
    _name_files(part, files, total)
    hf = config.hf_config()
    hf.dtype = dtype
    hf.save_pretrained(part)
    if folder.exists():
        folder.rmdir()
    part.rename(folder)


def _name_files(folder: Path, files: list[list[str]], total: int) -> None:
    """Give the written files the names that ``transformers`` expects, and an index if there are several."""
    if len(files) == 1:
        (folder / "0.tmp").rename(folder / SINGLE)
        return
    where: dict[str, str] = {}
    for number, tensors in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        (folder / f"{number}.tmp").rename(folder / name)
        where.update(dict.fromkeys(tensors, name))
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _check_config(folder: Path, config: ModelConfig) -> None:
    """Raise :class:`ConfigError` unless ``config.json`` agrees with ``config`` in everything that decides the model."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{folder} is not a Hugging Face model folder: it has no config.json")
    expected = config.hf_config()
    data = _json(path)
    if data.get("model_type") != expected.model_type:
        raise ConfigError(f"{path}: model_type is {data.get('model_type')!r}, {config.name} is {expected.model_type!r}")
    try:
        found = type(expected).from_dict(data)
    except Exception as error:  # the strict validators of transformers raise many types
        raise ConfigError(f"{path} is not a valid {type(expected).__name__}: {str(error).splitlines()[0]}") from None
    ours, theirs = _decisive(expected), _decisive(found)
    for field, value in ours.items():
        if theirs[field] != value:
            raise ConfigError(f"{path}: {field} is {theirs[field]!r}, but {config.name} has {value!r}")


def _decisive(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the fields that change what a model computes."""
    rope = getattr(hf, "rope_parameters", None) or {}
    return {
        **{field: getattr(hf, field) for field in _DECISIVE},
        "mlp_bias": getattr(hf, "mlp_bias", False),
        "use_sliding_window": getattr(hf, "use_sliding_window", False),
        "rope_type": rope.get("rope_type", "default"),
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
    }


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor name, from the index or the single file."""
    if (folder / INDEX).is_file():
        listed = _json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise ConfigError(f"{folder / INDEX} has no weight_map")
        for name, file in listed.items():
            if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
                raise ConfigError(f"{folder / INDEX}: {name} is said to be in {file!r}, which is not in the folder")
        return {name: folder / file for name, file in listed.items()}
    if (folder / SINGLE).is_file():
        with _open(folder / SINGLE) as file:
            return dict.fromkeys(file.keys(), folder / SINGLE)
    raise ConfigError(f"{folder} has neither {SINGLE} nor {INDEX}; convert other formats with save_pretrained first")


def _check_tensors(folder: Path, files: dict[str, Path], wanted: dict[str, tuple[int, ...]], tied: bool) -> None:
    for path in sorted(set(files.values())):
        with _open(path) as file:
            present = set(file.keys())
            for name in (n for n, p in files.items() if p == path):
                if name not in present:
                    raise ConfigError(f"{path} lacks {name}, which {INDEX} says it has")
                shape = tuple(file.get_slice(name).get_shape())
                if name in wanted and shape != wanted[name]:
                    raise ConfigError(f"{path}: {name} has shape {shape}, expected {wanted[name]}")
    for name in wanted:
        if name not in files:
            raise ConfigError(f"{folder} lacks the tensor {name}")
    for name in files:
        # the copy of a tied head and the rotary tables of old checkpoints say nothing new
        redundant = (tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq")
        if name not in wanted and not redundant:
            raise ConfigError(f"{folder} has the tensor {name}, for which this architecture has no place")


def _read(path: Path, name: str) -> Tensor:
    with _open(path) as file:
        return file.get_tensor(name)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return data
