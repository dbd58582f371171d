"""Figures: pure functions of tidy tables that survive missing data, label their axes and say their kind."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from impl.harness import balance_spec
from impl.harness.tidy import collect
from paper_figures import balance, precision, step_time, style
from paper_figures.__main__ import main
from tests.unit import fake_runs

FOLDER = Path(__file__).parents[2] / "experiments"
CSV = str(Path(__file__).parents[2] / "results" / "published" / "canzona.csv")
PUBLISHED = pd.read_csv(CSV)


def step_time_frame(folder, *, finished: bool = True):
    experiment = fake_runs.step_time_experiment()
    for run in experiment.runs("ci") if finished else ():
        fake_runs.step_time_run(folder, run)
    return collect(experiment, "ci", folder)


def precision_frame(folder, *, finished: bool = True):
    experiment = fake_runs.precision_experiment()
    for run in experiment.runs("ci") if finished else ():
        fake_runs.precision_run(folder, run)
    return collect(experiment, "ci", folder)


@pytest.fixture(scope="module")
def plans() -> pd.DataFrame:
    spec = balance_spec.load(FOLDER / "balance.yaml")
    return balance_spec.table(list(balance_spec.rows(spec, "ci")))


def texts(figure: Figure) -> str:
    """Everything that is written in a figure."""
    found = [t.get_text() for t in figure.findobj(lambda a: hasattr(a, "get_text"))]
    return "\n".join(found)


def overlaps(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of visible texts of a figure that cover each other."""
    FigureCanvasAgg(figure).draw()
    boxes = []
    lines = [line for axes in figure.axes for line in (axes.xaxis, axes.yaxis)]
    hidden = {tick.label1 for line in lines for tick in line.get_major_ticks()}
    hidden -= {tick.label1 for line in lines for tick in line._update_ticks()}  # those that are in view
    for text in figure.findobj(lambda a: type(a).__name__ in ("Text", "Annotation")):
        if text not in hidden and text.get_visible() and text.get_text().strip():
            boxes.append((text.get_text(), text.get_window_extent().shrunk(0.9, 0.9)))
    pairs = [(a, b) for i, a in enumerate(boxes) for b in boxes[i + 1 :]]
    return [(a[0], b[0]) for a, b in pairs if a[1].overlaps(b[1])]


@pytest.mark.parametrize(
    ("module", "frame", "labels"),
    [
        (step_time, step_time_frame, ["optimizer step, ms", "iteration, ms", "DP2 x TP2 (shared cores)", "Canzona"]),
        (precision, precision_frame, ["step", "training loss, nats", "zero at every step", "Canzona"]),
    ],
    ids=["step_time", "precision"],
)
def test_figures_label_axes_and_say_their_kind(tmp_path, module, frame, labels):
    figure = module.figure(frame(tmp_path), PUBLISHED)
    written = texts(figure)
    assert "Measured" in written
    assert all(label in written for label in labels)
    assert overlaps(figure) == []


def test_balance_figure_shows_planned_beside_published(plans):
    figure = balance.figure(plans, PUBLISHED)
    written = texts(figure)
    for label in ("Planned; diamonds: published", "largest / mean", "DP ranks", "micro-group capacity, MiB", "Canzona"):
        assert label in written
    diamonds = [line for line in figure.axes[0].lines if line.get_marker() == "D"]
    assert sorted(float(line.get_ydata()[0]) for line in diamonds) == [1.11, 1.43, 2.46, 3.24]
    assert overlaps(figure) == []


@pytest.mark.parametrize("blank", [["flops_ratio", "memory_ratio", "per_gpu_flops_ratio"], None])
def test_balance_figure_survives_missing_plans(plans, blank, tmp_path):
    broken = plans.assign(**dict.fromkeys(blank, float("nan")), status="failed") if blank else plans.iloc[:0]
    style.save(balance.figure(broken, PUBLISHED), tmp_path / "b.png")
    assert "failed" in balance.table(broken, PUBLISHED) or blank is None


def test_overlap_check_finds_an_overlap():
    figure = Figure()
    figure.text(0.5, 0.5, "one")
    figure.text(0.505, 0.5, "two")
    assert overlaps(figure) == [("one", "two")]


@pytest.mark.parametrize(("module", "frame"), [(step_time, step_time_frame), (precision, precision_frame)])
def test_figures_of_all_nan_columns_are_made(tmp_path, module, frame):
    figure = module.figure(frame(tmp_path, finished=False), PUBLISHED)
    style.save(figure, tmp_path / "f.png")
    assert (tmp_path / "f.pdf").stat().st_size > 1000
    assert "missing" in texts(figure)


def test_precision_figure_scales_to_a_difference(tmp_path):
    experiment = fake_runs.precision_experiment(seeds=[0])
    for run in experiment.runs("ci"):
        fake_runs.precision_run(tmp_path, run, offset=1e-5 if run.name.startswith("canzona") else 0.0, after=3)
    figure = precision.figure(collect(experiment, "ci", tmp_path), PUBLISHED)
    assert "zero at every step" not in texts(figure)
    assert figure.axes[2].get_ylim()[1] >= 1e-5
    assert figure.axes[2].get_yscale() == "symlog"


def test_equal_tables_give_equal_files(tmp_path):
    frame = step_time_frame(tmp_path)
    for name in ("a", "b"):
        style.save(step_time.figure(frame, PUBLISHED), tmp_path / f"{name}.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.pdf").read_bytes() == (tmp_path / "b.pdf").read_bytes()


def test_figure_command_writes_pdf_and_png(tmp_path):
    source = tmp_path / "t.parquet"
    precision_frame(tmp_path).to_parquet(source)
    assert (
        main(["figure", "precision", "--in", str(source), "--published", CSV, "--out", str(tmp_path / "out" / "p.pdf")])
        == 0
    )
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"p.pdf", "p.png"}


def test_palette_is_distinct():
    pairs = [(name, name.upper()) for name in (*style.KNOWN, *"abcdefgh")]
    colours = style.palette(pairs)
    assert len(set(colours.values())) == len(pairs)
    assert colours["SC"] == style.palette([("x", "X"), ("sc", "SC")])["SC"]
