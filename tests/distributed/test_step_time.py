"""The interleaved timing job: a row per repetition and system, facts of every rank, refusals before any process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from impl.__main__ import main

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
SYSTEMS = [
    {"id": "sc", "name": "SC", "strategy": "sc"},
    {"id": "canzona", "name": "Canzona", "strategy": "canzona"},
    {"id": "live", "name": "live", "strategy": "nv-layerwise", "nv_version": "ping-pong", "live": True},
]


def config(folder: Path, **changes: Any) -> Path:
    base = {"model": "qwen3-tiny", "layers": 2, "dp": 2, "batch": 4, "sequence": 16, "plan": {"bucket_elements": 9000}}
    spec = {"base": base, "systems": SYSTEMS, "repetitions": 3, "warmup": 1, **changes}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def test_alternates_the_systems_and_leaves_a_record(tmp_path: Path) -> None:
    assert main(["step-time", "--config", str(config(tmp_path)), "--out", str(tmp_path / "run")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    order = [row["system"] for row in rows]
    assert order == ["sc", "canzona", "live", "canzona", "live", "sc", "live", "sc", "canzona"], "the order rotates"
    for row in rows:
        seconds = row["seconds"]
        assert 0 < seconds["optimizer_step"] < seconds["iteration"]
        assert 0 < seconds["forward_backward"] < seconds["iteration"]
    losses = {name: [loss for row in rows if row["system"] == name for loss in row["losses"]] for name in set(order)}
    assert losses["canzona"] == losses["sc"], "the same weights on the same data"
    assert [row["last_step"] for row in rows if row["system"] == "sc"] == [5, 7, 9]  # the audited one, then pairs
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["status"] == "done"
    systems = manifest["result"]["systems"]
    assert set(systems) == {"sc", "canzona", "live"}
    assert not any("params_digest" in facts for facts in systems.values())
    held = {name: sum(rank["state"] for rank in facts["state_bytes"]) for name, facts in systems.items()}
    assert held["canzona"] < 0.6 * held["sc"], "one copy of the optimizer state instead of two"
    reduced = {name: facts["bytes"]["grad_reduce"]["dp"] for name, facts in systems.items()}
    assert reduced["live"] == reduced["sc"], "both all-reduce"
    assert reduced["canzona"] < 0.7 * reduced["sc"], "reduce-scatter moves half"


@pytest.mark.parametrize("optimizer", ["adamw", "soap"])
def test_several_timed_steps_and_equal_parameters(tmp_path: Path, optimizer: str) -> None:
    """Also with AdamW for everything: every system runs where there is no matrix for it to place."""
    base = {"model": "qwen3-tiny", "layers": 2, "dp": 2, "batch": 4, "sequence": 16, "optimizer": optimizer}
    names = ("sc", "nv-layerwise", "asc", "canzona")
    systems = [{"id": name, "name": name, "strategy": name} for name in names]
    counts = {"repetitions": 2, "warmup": 0, "timed_steps": 3, "compare_parameters": True}
    path = config(tmp_path, base=base, systems=systems, **counts)
    assert main(["step-time", "--config", str(path), "--out", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run" / "manifest.json").read_text())["result"]["systems"]
    assert set(found) == set(names)
    assert len({facts["params_digest"] for facts in found.values()}) == 1
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {name: [loss for row in rows if row["system"] == name for loss in row["losses"]] for name in names}
    assert len(losses["sc"]) == 1 + 2 * (1 + 3)
    assert len(set(losses["sc"])) == len(losses["sc"]), "it trains"
    assert all(losses[name] == losses["sc"] for name in names)


def test_a_live_system_of_another_version_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {**SYSTEMS[2], "nv_version": "lpt-ns"}
    path = config(tmp_path, systems=[SYSTEMS[0], wrong])
    assert main(["step-time", "--config", str(path), "--out", str(tmp_path / "run")]) == 2
    assert "ping-pong" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
