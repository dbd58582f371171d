"""Tables on disk: both forms, whole or not at all, and one line where they cannot be written."""

from pathlib import Path

import pandas as pd
import pytest

from impl.__main__ import main
from impl.errors import ConfigError
from impl.harness.tables import write_table

pytestmark = pytest.mark.timeout(60)
FRAME = pd.DataFrame({"name": ["a", "b"], "value": [1.5, None]})
ROOT = Path(__file__).parents[2]
COMMANDS = [
    ["balance", "--config", str(ROOT / "experiments/balance.yaml"), "--tier", "ci"],
    ["projection", "--config", str(ROOT / "experiments/scaling.yaml"), "--tier", "ci"],
    ["pipeline-projection", "--config", str(ROOT / "experiments/pipeline_projection.yaml"), "--tier", "ci"],
]


def test_both_files_say_the_same_in_a_new_folder(tmp_path):
    path = tmp_path / "new" / "folder" / "table.parquet"
    write_table(FRAME, path)
    pd.testing.assert_frame_equal(pd.read_parquet(path), FRAME)
    pd.testing.assert_frame_equal(pd.read_csv(path.with_suffix(".csv")), FRAME)
    assert {p.name for p in path.parent.iterdir()} == {"table.parquet", "table.csv"}


def test_a_table_that_cannot_be_finished_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "table.parquet"
    write_table(FRAME, path)

    def interrupted(self: pd.DataFrame, target, **_):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(pd.DataFrame, "to_parquet", interrupted)
    with pytest.raises(ConfigError, match=r"cannot write .*table.parquet.*: No space left on device"):
        write_table(FRAME.head(1), path)
    pd.testing.assert_frame_equal(pd.read_parquet(path), FRAME)
    assert {p.name for p in tmp_path.iterdir()} == {"table.parquet", "table.csv"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
def test_a_folder_that_is_a_file_is_one_line(command, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main([*command, "--out", str(tmp_path / "file" / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: cannot write ")
    assert captured.err.count("\n") == 1
