"""One interface to training data, whatever it comes from."""

from __future__ import annotations

import copy
import glob
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from impl.errors import ConfigError
from impl.harness.parted_stream import PartedStream
from impl.harness.spec import DataSpec
from impl.harness.stream_data import PackedStream
from impl.harness.text_data import TextStream, embedded_text, read_files, tokenize
from impl.harness.tokens import load_tokenizer, one_line

SUFFIXES = {
    "text": (".txt", ".text", ".md"),
    "json": (".jsonl", ".ndjson", ".json", ".jsonl.gz"),
    "parquet": (".parquet",),
}
"""Kinds of local files, by the end of their names.  A single file with any other name is read as text."""
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class TokenStream(Protocol):
    """One DP rank's part of the training data, and the held-out set.  TP ranks of a DP rank read the same."""

    def batch(self, step: int) -> Tensor:
        """Return the sequences of 1-based ``step``, ``[batch / dp, sequence + 1]`` int64."""
        ...

    def heldout(self) -> Tensor:
        """Return the fixed held-out set, ``[heldout_sequences, sequence + 1]`` int64; the same on every rank."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to resume, as plain JSON data."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue as the stream that gave ``state`` would have."""
        ...


def open_stream(
    spec: DataSpec, *, sequence: int, batch: int, dp_rank: int, dp: int, seed: int, vocabulary: int
) -> TokenStream:
    """Return the stream of DP rank ``dp_rank`` of ``dp``.

    batch: sequences per step over all DP ranks, a multiple of ``dp``.
    vocabulary: of the model; a tokenizer with more tokens is refused.

    Nothing that comes with a dataset or tokenizer is executed.  With ``HF_HUB_OFFLINE=1`` a Hugging Face name is looked
    up in the local cache alone.  Raises :class:`ConfigError` for data or a tokenizer that is missing, unreadable, empty
    or too short.
    """
    tokenizer = load_tokenizer(spec.tokenizer, vocabulary)
    place = {"sequence": sequence, "dp_rank": dp_rank, "dp": dp, "heldout_sequences": spec.heldout_sequences}
    kind, files = ("embedded", []) if spec.source == "embedded" else _locate(spec)
    if kind in ("embedded", "text"):
        texts = [embedded_text()] if kind == "embedded" else read_files(files)
        tokens = tokenize(texts, tokenizer, spec.source)
        return TextStream(tokens, spec.source, batch=batch, seed=seed, **place)
    opener = _dataset_opener(spec, kind, files)

    def open_part(part: int, parts: int, heldout_sequences: int) -> PackedStream:
        return PackedStream(
            opener,
            tokenizer,
            spec.source,
            spec.text_field,
            sequence=sequence,
            rows=batch // parts,
            dp_rank=part,
            dp=parts,
            heldout_sequences=heldout_sequences,
        )

    return PartedStream(open_part, batch=batch, dp_rank=dp_rank, dp=dp, heldout_sequences=spec.heldout_sequences)


def check(spec: DataSpec, *, sequence: int, batch: int, dp: int, vocabulary: int) -> None:
    """Raise :class:`ConfigError` unless the data opens, fills the held-out set and gives the last rank a batch."""
    stream = open_stream(spec, sequence=sequence, batch=batch, dp_rank=dp - 1, dp=dp, seed=0, vocabulary=vocabulary)
    stream.batch(1)


def _locate(spec: DataSpec) -> tuple[str, list[Path]]:
    """Return the kind of the source (``text``, ``json``, ``parquet`` or ``hub``) and its local files."""
    path = Path(spec.source).expanduser()
    if path.is_file():
        found = next((k for k, ends in SUFFIXES.items() if path.name.lower().endswith(ends)), "text")
        files = [path]
    elif path.is_dir():
        found, files = _folder(path)
    else:
        looks_local = spec.source.startswith(("/", ".", "~")) or spec.source.lower().endswith(
            sum(SUFFIXES.values(), ())
        )
        if looks_local or not HUB_NAME.fullmatch(spec.source):
            raise ConfigError(
                f"data source {spec.source!r} does not exist: give a text, jsonl or parquet file or folder, the name "
                "of a Hugging Face dataset, or 'embedded'"
            )
        return "hub", []
    if spec.split != "train" or spec.subset is not None:
        raise ConfigError(f"data source {spec.source!r} is local: data.split and data.subset do not apply to it")
    return found, files


def _folder(folder: Path) -> tuple[str, list[Path]]:
    by_kind = {
        kind: sorted(p for p in folder.rglob("*") if p.is_file() and p.name.lower().endswith(ends))
        for kind, ends in SUFFIXES.items()
    }
    present = {kind: files for kind, files in by_kind.items() if files}
    if not present:
        raise ConfigError(f"data source {folder} has no files that end in {', '.join(sum(SUFFIXES.values(), ()))}")
    if len(present) > 1:
        raise ConfigError(f"data source {folder} mixes {' and '.join(present)} files: name a folder with one kind")
    return next(iter(present.items()))


def _dataset_opener(spec: DataSpec, kind: str, files: list[Path]) -> Callable[[int, int], Any]:
    from datasets import disable_progress_bars, load_dataset, logging  # slow to import, and not needed for text
    from datasets.distributed import split_dataset_by_node
    from huggingface_hub.utils import logging as hub_logging

    disable_progress_bars()
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()  # each of its retries would be a warning
    try:
        if kind == "hub":
            dataset = load_dataset(spec.source, spec.subset, split=spec.split, streaming=True)
        else:
            names = [glob.escape(str(f)) for f in files]
            dataset = load_dataset(kind, data_files=names, split="train", streaming=True)
    except Exception as error:  # datasets, fsspec and pyarrow raise their own types, bare Exception among them
        raise ConfigError(f"cannot open data source {spec.source!r}: {one_line(error)}") from None

    def open_part(rank: int, dp: int) -> Any:
        return split_dataset_by_node(copy.deepcopy(dataset), rank=rank, world_size=dp)  # iterating changes its state

    return open_part
