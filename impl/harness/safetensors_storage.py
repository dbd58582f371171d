"""Storage for ``torch.distributed.checkpoint`` that holds no pickles: safetensors files and a JSON index.

torch's own storage pickles the index, and its safetensors storage keeps one piece of a tensor per rank; here a rank may
write several.  ``rank-R.safetensors`` holds the pieces that rank R wrote, ``index.json`` says where everything is:

    {"format": 1, "tensors": {name: {"dtype": "float32", "shape": [6, 4],
                                     "pieces": [{"offsets": [0, 0], "sizes": [3, 4], "file": ..., "crc32": ...}]}}}

A file holds a piece as ``name@0,0``.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from impl.harness.record import write_atomically

FORMAT = 1
INDEX = "index.json"


@dataclass(frozen=True)
class Place:
    """Where a piece lies and what its bytes must add up to."""

    file: str
    crc32: int


class SafetensorsWriter(StorageWriter):
    """Writes one checkpoint into the folder ``draft``, which it empties first.

    rank: of this process, the number in its file's name.
    finish: called on the coordinating rank when every rank's file and the index are safely on disk.
    """

    def __init__(self, draft: Path, rank: int, finish: Callable[[], None]) -> None:
        self._draft, self._rank, self._finish = draft, rank, finish

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Empty the draft on the coordinating rank; the others write only after its plan has reached them."""
        if is_coordinator:
            shutil.rmtree(self._draft, ignore_errors=True)
            self._draft.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return ``plan``."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return ``plans``."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file and wait until it is on disk."""
        tensors = {
            _name(item.index): cast(Tensor, planner.resolve_data(item)).detach().cpu().contiguous()
            for item in plan.items
        }
        file = f"rank-{self._rank}.safetensors"
        if tensors:
            save_file(tensors, self._draft / file)
            with (self._draft / file).open("rb") as written:
                os.fsync(written.fileno())
        results = [
            WriteResult(item.index, t.numel() * t.element_size(), Place(file, _crc(t)))
            for item, t in ((item, tensors[_name(item.index)]) for item in plan.items)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and finish the checkpoint."""
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {}
        for name, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            pieces = []
            for chunk in tensor.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                where = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
                pieces.append({**where, "file": place.file, "crc32": place.crc32})
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(tensor.size), "pieces": pieces}
        write_atomically(self._draft / INDEX, json.dumps({"format": FORMAT, "tensors": tensors}))
        self._finish()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a writer is never found by a path."""
        return False


class SafetensorsReader(StorageReader):
    """Reads the checkpoint in ``folder`` whose index is ``metadata`` (:func:`read_index`).

    Raises ``ValueError`` for a piece that is not what the index says or has another checksum.
    """

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self._folder, self._metadata = folder, metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return ``plan``."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return ``plans``."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read each needed piece once, check it, and copy what is asked for to where it belongs."""
        by_file: dict[str, dict[MetadataIndex, list[ReadItem]]] = defaultdict(lambda: defaultdict(list))
        for item in plan.items:
            by_file[self._metadata.storage_data[item.storage_index].file][item.storage_index].append(item)
        for file, pieces in by_file.items():
            try:
                self._read_file(file, pieces, planner)
            except SafetensorError as error:  # which cannot be pickled, to tell the other ranks
                raise ValueError(f"{file}: {error}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, file: str, pieces: dict[MetadataIndex, list[ReadItem]], planner: LoadPlanner) -> None:
        with safe_open(self._folder / file, framework="pt") as opened:
            for index, items in pieces.items():
                piece = self._checked(index, opened.get_tensor(_name(index)), file)
                for item in items:
                    target = planner.resolve_tensor(item).detach()
                    ends = zip(item.storage_offsets, item.lengths, strict=True)
                    target.copy_(piece[tuple(slice(start, start + n) for start, n in ends)])
                    planner.commit_tensor(item, target)

    def _checked(self, index: MetadataIndex, piece: Tensor, file: str) -> Tensor:
        saved = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(saved, TensorStorageMetadata)
        if piece.dtype != saved.properties.dtype:
            raise ValueError(f"{_name(index)} in {file} is {piece.dtype}, not {saved.properties.dtype}")
        if _crc(piece) != self._metadata.storage_data[index].crc32:
            raise ValueError(f"{_name(index)} in {file} has another checksum than when it was written")
        return piece

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a reader is never found by a path."""
        return False


def read_index(folder: Path) -> Metadata:
    """Return what the checkpoint in ``folder`` holds, ``storage_data`` a :class:`Place` for each piece.

    Raises ``OSError``, ``ValueError``, ``KeyError`` or ``TypeError`` if the index is missing, damaged, or does not
    cover every tensor.
    """
    data = json.loads((folder / INDEX).read_text())
    if data["format"] != FORMAT:
        raise ValueError(f"{INDEX} has format {data['format']!r}, not {FORMAT}")
    tensors: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    for name, tensor in data["tensors"].items():
        dtype, shape = getattr(torch, tensor["dtype"], None), torch.Size(tensor["shape"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{INDEX} gives {name} the dtype {tensor['dtype']!r}")
        chunks = [ChunkStorageMetadata(torch.Size(p["offsets"]), torch.Size(p["sizes"])) for p in tensor["pieces"]]
        if sum(math.prod(c.sizes) for c in chunks) != math.prod(shape):
            raise ValueError(f"{INDEX} has not all of {name}")
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)
        for chunk, piece in zip(chunks, tensor["pieces"], strict=True):
            if Path(piece["file"]).name != piece["file"]:
                raise ValueError(f"{INDEX} names the file {piece['file']!r}, which is not in its folder")
            places[MetadataIndex(name, chunk.offsets)] = Place(piece["file"], int(piece["crc32"]))
    return Metadata(tensors, storage_data=places)


def check_files(folder: Path, metadata: Metadata) -> None:
    """Raise ``OSError``, ``ValueError`` or safetensors' error unless every piece is there with its shape.

    Reads the headers alone, which say how long a file is.
    """
    by_file: dict[str, list[tuple[str, list[int]]]] = defaultdict(list)
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        for chunk in tensor.chunks:
            index = MetadataIndex(name, chunk.offsets)
            by_file[metadata.storage_data[index].file].append((_name(index), list(chunk.sizes)))
    for file, pieces in by_file.items():
        with safe_open(folder / file, framework="pt") as opened:
            there = set(opened.keys())
            for name, sizes in pieces:
                if name not in there or opened.get_slice(name).get_shape() != sizes:
                    raise ValueError(f"{file} does not hold {name} as {INDEX} says")


def _name(index: MetadataIndex) -> str:
    assert index.offset is not None
    return f"{index.fqn}@{','.join(map(str, index.offset))}"


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
