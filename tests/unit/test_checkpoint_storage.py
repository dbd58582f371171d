"""Storage of checkpoints: what comes back is what went in, damage is found, and nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from impl.canzona.global_tensor import GlobalTensor, HostCopy, Loading, Saving
from impl.canzona.rectangles import Rectangle
from impl.harness.safetensors_storage import INDEX, SafetensorsReader, SafetensorsWriter, check_files, read_index
from tests.distributed.ranks import one_rank

WHOLE = torch.arange(24.0).view(6, 4)


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    with one_rank() as group:
        yield group


def tree(matrix: torch.Tensor, other: torch.Tensor, count: torch.Tensor) -> dict[str, GlobalTensor]:
    """``matrix`` in three pieces of which one is not contiguous, a whole tensor of another dtype, and a scalar."""
    parts = [Rectangle((0, 0), matrix[:2]), Rectangle((2, 0), matrix[2:, :3]), Rectangle((2, 3), matrix[2:, 3:])]
    return {"m": GlobalTensor((6, 4), parts), "b": GlobalTensor.whole(other), "n": GlobalTensor.whole(count)}


def written(folder: Path, group: dist.ProcessGroup) -> Path:
    done = []
    state = tree(WHOLE.clone(), torch.ones(3, dtype=torch.bfloat16), torch.tensor(7))
    future = async_save(
        cast(dict[str, Any], state),
        storage_writer=SafetensorsWriter(folder, 0, lambda: done.append(True)),
        planner=Saving(),
        process_group=group,
        async_stager=HostCopy(),
    )
    state["m"].rectangles[0].tensor.fill_(-1.0)  # training goes on
    cast(Any, future).result()
    assert done == [True]
    return folder


def read(folder: Path, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    out = {"m": torch.zeros(6, 4), "b": torch.zeros(3, dtype=torch.bfloat16), "n": torch.tensor(0)}
    others = {  # cut in another way than when it was saved
        "m": GlobalTensor((6, 4), [Rectangle((0, 0), out["m"][:, :1]), Rectangle((0, 1), out["m"][:, 1:])]),
        "b": GlobalTensor.whole(out["b"]),
        "n": GlobalTensor.whole(out["n"]),
    }
    reader = SafetensorsReader(folder, read_index(folder))
    load(cast(dict[str, Any], others), storage_reader=reader, planner=Loading(), process_group=group)
    return out


def test_what_was_saved_comes_back_cut_in_another_way(tmp_path: Path, alone: dist.ProcessGroup) -> None:
    folder = written(tmp_path / "draft", alone)
    assert sorted(p.name for p in folder.iterdir()) == [INDEX, "rank-0.safetensors"]
    check_files(folder, read_index(folder))
    got = read(folder, alone)
    assert torch.equal(got["m"], WHOLE)
    assert torch.equal(got["b"], torch.ones(3, dtype=torch.bfloat16))
    assert int(got["n"]) == 7
    index = json.loads((folder / INDEX).read_text())["tensors"]
    assert (index["m"]["shape"], index["b"]["dtype"], index["n"]["shape"]) == ([6, 4], "bfloat16", [])
    assert len(load_file(folder / "rank-0.safetensors")) == sum(len(t["pieces"]) for t in index.values()) == 5


class Bomb:
    """Touches a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", [".metadata", INDEX, "rank-0.safetensors"])
def test_a_malicious_pickle_is_not_executed(tmp_path: Path, alone: dist.ProcessGroup, name: str) -> None:
    """``.metadata`` is where torch's own storage looks; a pickle in place of our files is only unreadable."""
    folder, mark = written(tmp_path / "draft", alone), tmp_path / "executed"
    (folder / name).write_bytes(pickle.dumps(Bomb(mark)))
    if name == ".metadata":
        assert torch.equal(read(folder, alone)["m"], WHOLE)
    else:
        with pytest.raises(BaseException, match=r"utf-8|codec|header|Expecting"):
            read(folder, alone)
    assert not mark.exists()
    pickle.loads((folder / name).read_bytes())  # the bomb is a real one
    assert mark.exists()


def damaged(folder: Path, how: str) -> None:
    file, index = folder / "rank-0.safetensors", folder / INDEX
    data = json.loads(index.read_text())
    pieces = data["tensors"]["m"]["pieces"]
    if how == "cut short":
        os.truncate(file, file.stat().st_size - 4)
    elif how == "one bit":
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    elif how == "missing":
        file.unlink()
    elif how == "no index":
        index.unlink()
    elif how == "hole":
        pieces.pop()
    elif how == "elsewhere":
        pieces[0]["file"] = "../rank-0.safetensors"
    elif how == "dtype":
        data["tensors"]["m"]["dtype"] = "load"
    elif how == "future":
        data["format"] = 2
    if how in ("hole", "elsewhere", "dtype", "future"):
        index.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut short", "MetadataIncompleteBuffer|incomplete|header"),
        ("one bit", "has another checksum than when it was written"),
        ("missing", "No such file"),
        ("no index", "No such file"),
        ("hole", "index.json has not all of m"),
        ("elsewhere", "not in its folder"),
        ("dtype", "gives m the dtype 'load'"),
        ("future", "index.json has format 2, not 1"),
    ],
)
def test_damage_is_found(tmp_path: Path, alone: dist.ProcessGroup, how: str, message: str) -> None:
    folder = written(tmp_path / "draft", alone)
    damaged(folder, how)
    with pytest.raises(BaseException, match=message):
        read(folder, alone)
    if how != "one bit":  # a look at the headers is enough
        with pytest.raises(Exception, match=message):
            check_files(folder, read_index(folder))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2)}, "it has no x"),
        ({"b": torch.zeros(3)}, r"b is torch.bfloat16 \[3\] there but torch.float32 \[3\] here"),
        ({"b": torch.zeros(4, dtype=torch.bfloat16)}, r"\[3\] there but torch.bfloat16 \[4\] here"),
    ],
)
def test_other_tensors_than_were_saved_are_refused(
    tmp_path: Path, alone: dist.ProcessGroup, change: dict[str, torch.Tensor], message: str
) -> None:
    folder = written(tmp_path / "draft", alone)
    wanted = {name: GlobalTensor.whole(t) for name, t in change.items()}
    reader = SafetensorsReader(folder, read_index(folder))
    with pytest.raises(BaseException, match=message):
        load(cast(dict[str, Any], wanted), storage_reader=reader, planner=Loading(), process_group=alone)
