"""``python -m impl project``: what it prints, writes and refuses, and what it says of a step that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from impl.__main__ import main
from impl.projection import plot
from impl.projection.timeline import COMPUTE, Timeline
from impl.projection.uncertain import DRAWS, Cost, exact

POINT = "--model qwen3-32b --tp 8 --dp 32 --hardware h100x256"
SMALL = "--model qwen3-tiny --tp 2 --dp 2 --batch 4 --sequence 64"
TIMES = ("iteration_s", "forward_backward_s", "optimizer_s", "exposed_communication_s")
PARTS = ("parameters", "gradients", "masters", "state", "micro_groups", "activations", "logits")


def run(capsys: pytest.CaptureFixture[str], line: str, *more: object) -> tuple[int, str, str]:
    code = main(["project", *line.split(), *map(str, more)])
    out = capsys.readouterr()
    return code, out.out, out.err


def found(capsys: pytest.CaptureFixture[str], line: str) -> dict[str, Any]:
    code, out, err = run(capsys, f"{line} --json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_the_issues_command_prints_every_number_with_band_and_evidence(capsys: pytest.CaptureFixture[str]) -> None:
    got = found(capsys, f"{POINT} --strategy canzona --optimizer muon")
    assert got["kind"] == "projected"
    assert got["fits"] is True
    assert got["reason"] is None
    for name in TIMES:
        low, high = got["band"][name]
        assert 0 < low < got[name] < high
        assert sum(got["evidence"][name].values()) == pytest.approx(1)
        kinds = {source.split(":")[0] for source in got["evidence"][name]}
        assert kinds <= {"roofline", "link", "assumption", "waiting for slower ranks"}
    for part in PARTS:
        assert got["memory_bytes"][part] > 0
        assert list(got["evidence"][f"memory_bytes.{part}"].values()) == [1.0]
    assert got["evidence"]["memory_bytes.state"] == {"planned: exact shapes": 1.0}
    assert "autograd" in next(iter(got["evidence"]["memory_bytes.activations"]))
    assert got["memory_bytes"]["total"] <= sum(got["memory_bytes"][p] for p in (*PARTS, "gathered", "staged"))
    assert got["optimizer_s"] < got["iteration_s"] < got["optimizer_s"] + got["forward_backward_s"] + got["phases"][
        "param_sync"
    ] + got["phases"]["grad_norm"] + 1e-9  # fmt: skip
    assert 0 < got["mfu"] < 1
    assert got["tokens_per_s"] == pytest.approx(128 * 2048 / got["iteration_s"])
    assert (got["model"], got["dp"], got["tp"], got["hardware"]) == ("qwen3-32b", 32, 8, "h100x256")
    assert got["workload"]["recompute"] == "none"


def test_the_four_systems_and_one_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{POINT} --bucket-elements 400000000"
    got = {
        name: found(capsys, f"{line} --strategy {name}" + (" --nv-version ping-pong" if "nv" in name else ""))
        for name in ("sc", "nv-layerwise", "asc", "canzona")
    }
    sc = got["sc"]
    assert sc["fits"] is False
    assert all(sc[name] is None for name in (*TIMES, "tokens_per_s", "mfu", "phases"))
    assert sc["reason"].startswith("needs ")
    assert sc["reason"].endswith("GB on rank dp 0 tp 0, the card has 85.0 GB")
    assert sc["memory_bytes"]["total"] > 85e9
    assert sc["band"] == {}
    assert all(name.startswith("memory_bytes.") for name in sc["evidence"])
    assert got["canzona"]["optimizer_s"] < got["asc"]["optimizer_s"] < got["nv-layerwise"]["optimizer_s"]
    assert got["nv-layerwise"]["parameter_gather_s"] > 0 == got["canzona"]["parameter_gather_s"]
    code, out, _ = run(capsys, f"{line} --strategy sc")
    assert code == 0
    assert f"does not fit: {sc['reason']}" in out
    assert "iteration" not in out


def test_readable_text_says_kind_band_and_sources(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, f"{SMALL} --hardware a100-80x4")
    assert code == 0
    for words in (
        "[projected]",
        "nominal",
        "90 of 100 draws",
        "exposed communication",
        "phase tp_exchange",
        "rests on",
    ):
        assert words in out
    assert "roofline: memory at 0.82 [0.70, 0.92] of 2.039 TB/s" in out
    assert "assumption: 5 us a kernel launch" in out, "so small a model is limited by launches"


def test_settings_change_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    base = f"{SMALL} --hardware h100x4"
    plain = found(capsys, base)
    for more in (
        "--sequence 128",
        "--batch 8 --microbatches 2",
        "--dtype float32",
        "--recompute full",
        "--tp-update blockwise",
        "--tp-update distributed",
        "--uneven padded --bucket-elements 5000",
        "--no-sequence-parallel",
        "--optimizer soap",
        "--strategy sc",
        "--strategy nv-layerwise --nv-version lpt-numel",
        "--layers 3",
        "--split atoms",
        "--split update --split-qkv heads",
    ):
        assert found(capsys, f"{base} {more}")["iteration_s"] != plain["iteration_s"], more
    assert found(capsys, base)["iteration_s"] == plain["iteration_s"], "and nothing else does"


@pytest.mark.parametrize(
    ("line", "part"),
    [
        (f"{POINT.replace('h100x256', 'h100x128')}", "has 128 devices, dp x tp needs 32 x 8 = 256: write h100x256"),
        (f"{POINT.replace('h100x256', 'h10x256')}", "unknown hardware 'h10x256': did you mean 'h100'"),
        (f"{POINT.replace('h100x256', 'h100')}", "say how many devices"),
        (f"{SMALL} --hardware local", "hardware local needs --kernels FILE"),
        (f"{SMALL.replace('tiny', 'tony')} --hardware h100x4", "unknown model 'qwen3-tony'"),
        (f"{SMALL} --hardware h100x4 --optimizer muom", "did you mean 'muon'"),
        (f"{SMALL} --hardware h100x4 --strategy canzone", "did you mean 'canzona'"),
        (f"{SMALL} --hardware h100x4 --batch 3", "batch 3 is not a multiple of dp x microbatches (2 x 1)"),
        (f"{SMALL} --hardware h100x4 --batch 0", "batch"),
        (f"{SMALL} --hardware h100x4 --recompute some", "recompute"),
        (f"{SMALL} --hardware h100x4 --dtype fp8", "dtype"),
        (f"{SMALL} --hardware h100x4 --tp-update maybe", "invalid choice"),
        (f"{SMALL} --hardware h100x4 --optimizer soap --tp-update distributed", "is for muon: soap needs exchange"),
        (f"{SMALL} --hardware h100x4 --draw picture.txt", "end the name in .png or .pdf"),
        (f"{SMALL} --hardware h100x4 --nv-version newest", "nv_version"),
        (f"{SMALL.replace('--tp 2', '--tp 3')} --hardware h100x6", "TP=3 does not divide"),
        (f"{SMALL}", "--hardware"),
    ],
)
def test_bad_input_ends_with_one_line_and_code_2(capsys: pytest.CaptureFixture[str], line: str, part: str) -> None:
    code, out, err = run(capsys, line)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert part in err


def test_trace_and_picture_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, picture = tmp_path / "new" / "trace.json", tmp_path / "new" / "step.png"
    assert run(capsys, f"{SMALL} --hardware h100x4 --trace {trace} --draw {picture}")[0] == 0
    events = json.loads(trace.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {f"dp {d} tp {t}" for d in (0, 1) for t in (0, 1)}
    assert {e["cat"] for e in spans} == {
        *("forward", "backward", "grad_reduce", "grad_norm", "optimizer_step", "tp_exchange", "param_sync")
    }
    assert {e["tid"] for e in spans} == {"compute", "dp", "tp", "world"}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_step_that_does_not_fit_has_no_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    code, _, err = run(capsys, f"{POINT} --strategy sc --trace {path}")
    assert code == 2
    assert f"{path} is not written: the step needs" in err
    assert not path.exists()


def test_the_picture_has_a_bar_for_every_span_in_its_phases_colour() -> None:
    timeline = Timeline((2, 1))
    rows = np.broadcast_to(np.array([[1.0], [3.0]]), (1 + DRAWS, 2, 1)).copy()
    first = timeline.add(COMPUTE, "u", "optimizer_step", rows, evidence={})
    sent = timeline.add("dp", "g", "param_sync", Cost.of(exact(2), "s"), after=[first], meet=[0])
    timeline.wait([sent], "param_sync")
    assert plot.telling(timeline) == [(1, 0), (0, 0)], "the busiest first"
    out = plot.figure(timeline, title="two ranks")
    (axes,) = out.axes
    bars = sorted((round(p.get_x(), 6), round(p.get_width(), 6), round(p.get_y() + 0.4)) for p in axes.patches)
    # rank 1 on rows 0 (compute) and 1 (dp), rank 0 on rows 2 and 3; rank 0 waits for rank 1 from 1 to 3, both for the
    # collective from 3 to 5
    assert bars == [(0, 1, 2), (0, 3, 0), (1, 2, 2), (3, 2, 0), (3, 2, 1), (3, 2, 2), (3, 2, 3)]
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        *("dp 1 tp 0  compute", "dp 1 tp 0  dp", "dp 0 tp 0  compute", "dp 0 tp 0  dp")
    ]
    assert axes.get_xlabel() == "seconds"
    assert "[projected]" in axes.get_title(loc="left")
    colours = {tuple(round(c, 3) for c in p.get_facecolor()[:3]) for p in axes.patches}
    assert len(colours) == 3, "two phases, and white below the hatches of waits"
    legend = [text.get_text() for text in out.legends[0].get_texts()]
    assert legend == ["optimizer_step", "param_sync", "waiting"]
