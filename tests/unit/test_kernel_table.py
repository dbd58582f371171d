"""The table of kernel times: keys, the file, and what is refused."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from impl.errors import ConfigError
from impl.models import catalogue
from impl.optimizers.base import create
from impl.projection import kernel_table
from impl.projection.kernel_table import Row, Table
from impl.projection.machine import Block


def row(**changes: Any) -> Row:
    times = {"seconds": 2e-3, "q25": 1e-3, "q75": 4e-3, "n": 9, "spike": math.nan}
    place = {"backend": "cpu", "device": "Some CPU, 2 cores", "torch": "2.13.0", "threads": 1, "cores": 2}
    base = {"kernel": "norm", "key": "float32", "size": 100, "processes": 2, "dtype": "float32"}
    return Row(**{**base, **times, **place, "commit": "abc", "date": "2026-01-01", **changes})


UNMEASURED = {"seconds": math.nan, "q25": math.nan, "q75": math.nan, "n": 0, "note": "the time was used up"}


def test_a_file_holds_the_table_sorted_and_gives_it_back(tmp_path: Path) -> None:
    rows = (row(size=300), row(size=100), row(kernel="apply", spike=5e-3), row(key="x", **UNMEASURED))
    Table(()).merged(rows).write(tmp_path / "new" / "t.csv")
    found = kernel_table.read(tmp_path / "new" / "t.csv")
    assert [r.identity for r in found.rows] == sorted(
        (r.identity for r in rows), key=lambda i: (i[0], i[1], i[3], i[2])
    )
    by = {r.identity: r for r in found.rows}
    for given in rows:
        for name, value in dataclasses.asdict(given).items():
            other = getattr(by[given.identity], name)
            assert other == value or (isinstance(value, float) and math.isnan(value) and math.isnan(other)), name
    assert found.source == "t.csv"
    assert not list((tmp_path / "new").glob("*.tmp"))
    again = tmp_path / "again.csv"
    found.write(again)
    assert again.read_bytes() == (tmp_path / "new" / "t.csv").read_bytes()


def test_a_row_is_found_by_all_of_its_identity() -> None:
    table = Table((row(), row(key="x", **UNMEASURED)))
    assert table.find("norm", "float32", 2, 100) is table.rows[0]
    for wrong in (("apply", "float32", 2, 100), ("norm", "bfloat16", 2, 100), ("norm", "float32", 1, 100)):
        assert table.find(*wrong) is None
    assert table.find("norm", "float32", 2, 101) is None
    assert table.find("norm", "x", 2, 100) is None, "what was not measured is not there"
    assert table.processes() == [2]


def test_merging_keeps_times_and_replaces_them_by_newer_ones() -> None:
    old = Table((row(), row(size=200, **UNMEASURED)))
    merged = old.merged([row(**UNMEASURED), row(size=200, seconds=3e-3)])
    assert [r.seconds for r in merged.rows] == [2e-3, 3e-3]
    assert [r.seconds for r in merged.merged([row(seconds=2.5e-3)]).rows] == [2.5e-3, 3e-3]


@pytest.mark.parametrize("change", [{"device": "Another"}, {"torch": "2.9.0"}, {"threads": 2}, {"backend": "cuda"}])
def test_one_table_is_of_one_place(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mixes .*--fresh"):
        Table((row(),)).merged([row(size=3, **change)])
    Table((row(), row(size=3, **change))).write(tmp_path / "t.csv")
    with pytest.raises(ConfigError, match="mixes"):
        kernel_table.read(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seconds": -1.0}, "line 2: needs 0 < q25"),
        ({"q25": 3e-3}, "line 2: needs 0 < q25"),
        ({"q75": math.inf}, "line 2: needs 0 < q25"),
        ({"n": "many"}, "line 2: n must be a number, not 'many'"),
        ({"n": 0}, "or n 0 and a note"),
        ({"processes": 0}, "line 2"),
    ],
)
def test_a_wrong_row_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    Table((row(**change),)).write(tmp_path / "t.csv")
    with pytest.raises(ConfigError, match=message) as caught:
        kernel_table.read(tmp_path / "t.csv")
    assert "\n" not in str(caught.value)


def test_wrong_files_are_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    with pytest.raises(ConfigError, match="cannot read"):
        kernel_table.read(path)
    for text in ("", "a,b\n1,2\n", '"never closed'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is no kernel table") as caught:
            kernel_table.read(path)
        assert "\n" not in str(caught.value)
    Table((row(),)).write(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, lines[1]]) + "\n")
    with pytest.raises(ConfigError, match="norm float32 of size 100 with 2 processes is listed twice"):
        kernel_table.read(path)


def test_keys_hold_what_decides_the_time_and_nothing_else() -> None:
    small, deep = catalogue.load("qwen3-small").arch, catalogue.load("qwen3-small", 3).arch
    block = Block(small, "layer", 1, 2, 128, "float32")
    key = kernel_table.block_key(block)
    assert kernel_table.block_key(dataclasses.replace(block, arch=deep)) == key, "not the number of layers"
    changes = [{"rows": 1}, {"sequence": 64}, {"tp": 2}, {"dtype": "bfloat16"}, {"kind": "head"}]
    keys = {key, *(kernel_table.block_key(dataclasses.replace(block, **change)) for change in changes)}
    keys.add(kernel_table.block_key(dataclasses.replace(block, arch=catalogue.load("qwen3-tiny").arch)))
    assert len(keys) == len(changes) + 2
    muon = kernel_table.update_key(create("muon"), (4, 6))
    assert muon[0].endswith("4x6")
    assert muon[1] == 0
    assert kernel_table.update_key(create("muon", {"ns_steps": 3}), (4, 6)) != muon
    assert kernel_table.update_key(create("adamw"), (4, 6))[1] == 24
    staggered = create("basis-rotation", {"stagger": True, "offset": 3})
    plain = kernel_table.update_key(create("basis-rotation"), (4, 6))
    assert kernel_table.update_key(staggered, (4, 6)) == plain, "when the refresh falls does not change its share"
    assert kernel_table.update_key(create("basis-rotation", {"period": 5}), (4, 6)) != plain
