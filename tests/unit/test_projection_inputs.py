"""What makes a projection run again: its hardware files and its kernel table."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from impl.errors import ConfigError
from impl.harness import projection_inputs
from impl.projection import hardware

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hardware"
    shutil.copytree(hardware.FOLDER, folder)
    monkeypatch.setattr(hardware, "FOLDER", folder)
    monkeypatch.setattr(hardware.names, "__defaults__", (folder,))
    monkeypatch.setattr(hardware.split, "__defaults__", (folder,))
    return folder


def edit(path: Path) -> None:
    text = path.read_text()
    assert text.count("memory_bandwidth: ") == 1
    path.write_text(text.replace("memory_bandwidth: ", "memory_bandwidth: 1"))


@pytest.mark.parametrize(
    ("name", "used", "unused"),
    [("projection", "h100", "rtx3090"), ("scaling", "h100", "a100-80"), ("pipeline_projection", "rtx3090", "h200")],
)
def test_an_edited_hardware_file_is_another_hash_where_it_is_used(
    name: str, used: str, unused: str, files: Path
) -> None:
    path = EXPERIMENTS / f"{name}.yaml"
    before = projection_inputs.digest(path, files)
    edit(files / f"{unused}.yaml")
    assert projection_inputs.digest(path, files) == before
    (files / f"{used}.yaml").write_text("# a comment\n" + (files / f"{used}.yaml").read_text())
    assert projection_inputs.digest(path, files) == before
    edit(files / f"{used}.yaml")
    assert projection_inputs.digest(path, files) != before


def test_a_kernel_table_counts(tmp_path: Path) -> None:
    path, table = tmp_path / "e.yaml", tmp_path / "k.csv"
    path.write_text("kernels: k.csv\ntiers: {ci: {grids: [{hardware: h100}]}}\n")
    with pytest.raises(ConfigError, match=r"cannot read kernels k\.csv"):
        projection_inputs.digest(path, tmp_path)
    table.write_text("a")
    before = projection_inputs.digest(path, tmp_path)
    table.write_text("b")
    assert projection_inputs.digest(path, tmp_path) != before


def test_unknown_hardware_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("cases: [{hardware: h10x8}]\n")
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        projection_inputs.digest(path, tmp_path)
