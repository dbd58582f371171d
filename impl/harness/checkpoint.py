"""Checkpoints of DP x TP runs: whole tensors, which any other mesh or strategy can load.

A folder of :mod:`impl.harness.step_folders` is whole by itself: ``meta.json`` (:class:`Meta`) beside the files of
:mod:`impl.harness.safetensors_storage`.  ``torch.distributed.checkpoint`` (DCP) writes it in the background from copies
in host memory, and reads from it what each rank needs.  Nothing in it is pickled.
"""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from impl.canzona.engine import Engine
from impl.canzona.global_tensor import GlobalTensor, HostCopy, Loading, Saving
from impl.canzona.mesh import Mesh
from impl.canzona.portable import export, restore
from impl.canzona.rectangles import Shape
from impl.harness.parted_stream import merged
from impl.harness.record import CorruptRecord, write_atomically
from impl.harness.safetensors_storage import SafetensorsReader, SafetensorsWriter, check_files, read_index
from impl.harness.step_folders import draft_of, path_of, publish
from impl.models import hf_layout
from impl.models.catalogue import ModelConfig

META = "meta.json"
TIMEOUT = timedelta(hours=1)
"""Ranks wait for each other's files in the background; one that has died is noticed by the training itself."""
UNREADABLE = (OSError, ValueError, KeyError, TypeError, SafetensorError)
"""What reading files that are missing, cut short or altered raises."""


@dataclass(frozen=True)
class Meta:
    """What wrote a checkpoint.

    settings: the run's, resolved; spec: their digest.
    plan: digest of the plan.
    data: state of the token stream, see :func:`impl.harness.parted_stream.merged`.
    """

    step: int
    spec: str
    plan: str
    settings: dict[str, Any]
    data: dict[str, Any]

    @property
    def origin(self) -> str:
        """The mesh and strategy that wrote it, for people."""
        return "{strategy}, DP {dp} x TP {tp}".format(**self.settings)


class Checkpoints:
    """The checkpoints of a run in ``folder``; all ranks make one and call its methods in the same order.

    group: a gloo group of all ranks that nothing else uses: writing runs in a thread of its own.
    unpadded: see :func:`impl.canzona.portable.export`.
    """

    def __init__(self, folder: Path, group: dist.ProcessGroup, unpadded: dict[str, Shape]) -> None:
        self._folder, self.group, self._unpadded = folder, group, unpadded
        self._pending: tuple[int, Future[Any]] | None = None

    @classmethod
    def of_run(cls, folder: Path, model: ModelConfig, mesh: Mesh) -> Checkpoints:
        """Return the checkpoints in ``folder`` of a run of ``model``; all ranks of ``mesh`` must call."""
        ranks = list(range(mesh.dp * mesh.tp))
        group = cast(dist.ProcessGroup, dist.new_group(ranks, backend="gloo", timeout=TIMEOUT))
        return cls(folder, group, {p.name: hf_layout.unpadded(model, p) for p in model.parameters(mesh.tp)})

    def save(self, engine: Engine, meta: Meta) -> None:
        """Copy the state to host memory and start to write it; first wait until an earlier checkpoint is complete.

        A crash before every rank has written loses this checkpoint alone.

        meta: with this rank's part of the token stream's state.
        """
        self.wait()
        engine.synchronize()
        meta = dataclasses.replace(meta, data=merged(self._everyones(meta.data)))
        draft = draft_of(self._folder, meta.step)

        def finish() -> None:
            write_atomically(draft / META, json.dumps(dataclasses.asdict(meta)))
            publish(self._folder, meta.step)

        future = async_save(
            cast(dict[str, Any], export(engine, self._unpadded)),
            storage_writer=SafetensorsWriter(draft, dist.get_rank(self.group), finish),
            planner=Saving(),
            process_group=self.group,
            async_stager=HostCopy(),
        )
        self._pending = meta.step, cast(Future[Any], future)

    def wait(self) -> None:
        """Wait until the checkpoint in the making is complete; raises ``RuntimeError`` if it could not be written."""
        if self._pending is None:
            return
        (step, future), self._pending = self._pending, None
        error = future.exception()
        if error is not None:
            raise RuntimeError(f"the checkpoint of step {step} could not be written: {_cause(error)}") from error

    def load(self, path: Path, engine: Engine, advice: str) -> Meta:
        """Let a fresh ``engine`` go on from the checkpoint in the folder ``path``, whatever mesh and strategy wrote it.

        Afterwards all replicas of the parameters are equal, bit for bit.

        advice: what the user can do if the checkpoint cannot be used.

        Raises :class:`CorruptRecord` if it cannot be read or holds other tensors than the engine has.
        """
        try:
            meta, index = read_meta(path), read_index(path)
            step = restore(engine, lambda tree: self._fill(tree, path, index), self._unpadded)
            if step > meta.step:
                raise ValueError(f"its optimizers took {step} steps")
        except (*UNREADABLE, CheckpointException) as error:
            raise CorruptRecord(f"checkpoint {path} cannot be read ({_cause(error)}): {advice}") from None
        return meta

    def load_own(self, step: int, engine: Engine, spec: str) -> Meta:
        """Return :meth:`load` of the run's own checkpoint of ``step``.

        Raises :class:`CorruptRecord` also if it was written under other settings than those with the digest ``spec``.
        """
        path = path_of(self._folder, step)
        advice = f"delete {path} to resume from the one before"
        meta = self.load(path, engine, advice)
        if (meta.step, meta.spec) != (step, spec):
            raise CorruptRecord(
                f"checkpoint {path} was written after step {meta.step} under settings {meta.spec[:12]}: {advice}"
            )
        return meta

    def _fill(self, tree: dict[str, GlobalTensor], path: Path, index: Metadata) -> None:
        """Read ``tree`` in place; raises ``ValueError`` unless the ranks together ask for everything in ``index``."""
        asked = {name for names in self._everyones(list(tree)) for name in names}
        left = sorted(index.state_dict_metadata.keys() - asked)
        if left:
            raise ValueError(f"it has {left[0]}, which this run has not")
        load(
            cast(dict[str, Any], tree),
            storage_reader=SafetensorsReader(path, index),
            planner=Loading(),
            process_group=self.group,
        )

    def _everyones(self, mine: Any) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, mine, group=self.group)
        return found


def read_meta(path: Path) -> Meta:
    """Return what wrote the checkpoint in the folder ``path``; raises one of :data:`UNREADABLE`."""
    data = json.loads((path / META).read_text())
    meta = Meta(**data)
    if not all(isinstance(getattr(meta, f.name), _TYPES[f.name]) for f in dataclasses.fields(meta)):
        raise ValueError(f"{META} has a value of the wrong kind")
    return meta


def check(path: Path) -> Meta:
    """Return :func:`read_meta` after checking that the index and the files beside it are all there.

    Raises one of :data:`UNREADABLE`.  Tensors are not read.
    """
    meta = read_meta(path)
    check_files(path, read_index(path))
    return meta


_TYPES: dict[str, type] = {"step": int, "spec": str, "plan": str, "settings": dict, "data": dict}


def _cause(error: BaseException) -> str:
    """Return one line that says what went wrong, on the first rank where something did."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (inner, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {_cause(inner)}"
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
