"""A run that goes on with another number of DP ranks sees the same global batches of text and of streamed documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from impl.harness.data import TokenStream, open_stream
from impl.harness.parted_stream import PartedStream, merged
from impl.harness.spec import DataSpec

BATCH, STEPS = 12, 9


def documents(folder: Path, files: int) -> str:
    folder.mkdir()
    texts = [f"document {i} " + f"word{i * 7 % 13} " * (i % 5 + 1) for i in range(150)]
    for number in range(files):
        rows = [json.dumps({"text": text}) for text in texts[number::files]]
        (folder / f"{number}.jsonl").write_text("\n".join(rows) + "\n")
    return str(folder)


def ranks(source: str, dp: int) -> list[TokenStream]:
    spec = DataSpec(source=source, heldout_sequences=2)
    shared: dict[str, Any] = {"sequence": 16, "batch": BATCH, "dp": dp, "seed": 3, "vocabulary": 256}
    return [open_stream(spec, dp_rank=rank, **shared) for rank in range(dp)]


def batches(streams: list[TokenStream], steps: range) -> list[torch.Tensor]:
    return [torch.cat([stream.batch(step) for stream in streams]) for step in steps]


def state(streams: list[TokenStream]) -> dict[str, Any]:
    return json.loads(json.dumps(merged([stream.state_dict() for stream in streams])))


@pytest.mark.parametrize("files", [0, 1, 4], ids=["text", "one file", "four files"])
@pytest.mark.parametrize("dp", [1, 2, 4])
def test_the_same_global_batches_under_every_other_dp(tmp_path: Path, files: int, dp: int) -> None:
    source = documents(tmp_path / "data", files) if files else "embedded"
    first = ranks(source, dp)
    batches(first, range(1, 4))
    saved = state(first)
    expected = batches(first, range(4, STEPS + 1))
    for other in (1, 2, 3, 4, 6):
        again = ranks(source, other)
        for stream in again:
            stream.load_state_dict(saved)
        assert state(again) == saved
        got = batches(again, range(4, 7))
        middle = ranks(source, dp)  # and back, from a run that itself went on from another
        for stream in middle:
            stream.load_state_dict(state(again))
        got += batches(middle, range(7, STEPS + 1))
        assert all(map(torch.equal, got, expected)), other
        assert all(torch.equal(stream.heldout(), first[0].heldout()) for stream in again)


def test_without_the_parts_the_batches_are_others(tmp_path: Path) -> None:
    """Negative control: fresh streams under another DP size read the documents in another order."""
    source = documents(tmp_path / "data", 1)
    assert not torch.equal(batches(ranks(source, 2), range(1, 2))[0], batches(ranks(source, 3), range(1, 2))[0])


def test_a_rank_reads_only_the_parts_that_its_rows_come_from(tmp_path: Path) -> None:
    source = documents(tmp_path / "data", 1)
    saved = state(ranks(source, 4))
    for dp, parts in ((2, [["0", "1"], ["2", "3"]]), (3, [["0", "1"], ["1", "2"], ["2", "3"]])):
        found = []
        for stream in ranks(source, dp):
            assert isinstance(stream, PartedStream)
            stream.load_state_dict(saved)
            found.append(list(stream.state_dict()["places"]))
        assert found == parts
