"""Whole tensors of which each rank holds rectangles, as ``torch.distributed.checkpoint`` (DCP) wants them.

DCP then does the resharding: what a rank asks for is read from whatever rectangles were saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    STATE_DICT_TYPE,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager

from impl.canzona.rectangles import Rectangle, Shape


class GlobalTensor:
    """A rank's rectangles of one whole tensor of ``shape``; several ranks may hold the same rectangle.

    Raises ``ValueError`` for rectangles of different dtypes.
    """

    def __init__(self, shape: Shape, rectangles: Sequence[Rectangle]) -> None:
        dtypes = {r.tensor.dtype for r in rectangles}
        if len(dtypes) != 1:
            raise ValueError(f"a whole tensor has one dtype, not {sorted(map(str, dtypes))}")
        self.shape, self.rectangles, self.dtype = torch.Size(shape), tuple(rectangles), dtypes.pop()
        self._by_offset = {torch.Size(r.offsets): r.tensor for r in rectangles}

    @classmethod
    def whole(cls, tensor: Tensor) -> GlobalTensor:
        """Return the global tensor that ``tensor`` is."""
        return cls(tuple(tensor.shape), [Rectangle((0,) * tensor.dim(), tensor)])

    def size(self) -> torch.Size:
        """Shape of the whole tensor (DCP compares it with the saved one)."""
        return self.shape

    def find(self, index: MetadataIndex) -> Tensor:
        """Return the rectangle at ``index.offset``."""
        assert index.offset is not None
        return self._by_offset[index.offset]

    def on_host(self) -> GlobalTensor:
        """Return a copy in host memory."""
        copies = [Rectangle(r.offsets, r.tensor.detach().to("cpu", copy=True).contiguous()) for r in self.rectangles]
        return GlobalTensor(tuple(self.shape), copies)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(r.offsets), r.tensor.size()) for r in self.rectangles]

    def __create_write_items__(self, key: str, _value: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]


class Saving(DefaultSavePlanner):
    """Saves a flat dictionary of global tensors; what several ranks hold, DCP has one of them write."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the rectangle that ``index`` names."""
        return self.state_dict[index.fqn].find(index)


class Loading(DefaultLoadPlanner):
    """Loads into the rectangles of a flat dictionary of global tensors, in place."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the dictionary as it is."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Return what this rank reads; raises ``ValueError`` where key, shape or dtype differ from what was saved."""
        assert self.metadata is not None
        for key, tensor in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(key)
            if not isinstance(saved, TensorStorageMetadata):
                raise ValueError(f"it has no {key}")
            mine, there = (tensor.dtype, tuple(tensor.shape)), (saved.properties.dtype, tuple(saved.size))
            if mine != there:
                raise ValueError(f"{key} is {there[0]} {list(there[1])} there but {mine[0]} {list(mine[1])} here")
        return super().create_local_plan()

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the rectangle that ``index`` names."""
        return self.state_dict[index.fqn].find(index)


class HostCopy(AsyncStager):
    """Copies global tensors to host memory before ``async_save`` returns, so that training may go on."""

    _synchronize_after_execute = False

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """Return the copies."""
        return {key: tensor.on_host() for key, tensor in state_dict.items()}
