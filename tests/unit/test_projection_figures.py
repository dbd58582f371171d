"""Tables and figures of projections: the experiment's notes, and marks of the cases that have no number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from impl.harness import projection_rows, projection_spec
from paper_figures import common, projected, projection, scaling, style
from tests.unit.test_figures import overlaps, texts
from tests.unit.test_projection_experiments import experiment
from tests.unit.test_robust_tables import drawn as readable
from tests.unit.test_robust_tables import without_numbers

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
PUBLISHED = pd.read_csv(ROOT / "results/published/canzona.csv")


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    notes = {"main": "A note about the main grid.", "split": "A note about splitting."}
    return projection_rows.table(list(projection_rows.rows(experiment(notes=notes), "ci", "projection", ROOT)))


@pytest.fixture(scope="module")
def sweep() -> pd.DataFrame:
    spec = projection_spec.load(ROOT / "experiments/scaling.yaml")
    return projection_rows.table(list(projection_rows.rows(spec, "ci", "scaling", ROOT)))


def crosses(drawn: Figure) -> list[tuple[float, float]]:
    """Return where the crosses of cases without a number are: x in data, y as a share of the axis."""
    lines = [line for axis in drawn.axes for line in axis.get_lines() if line.get_marker() == "x"]
    return [(float(x), float(y)) for line in lines for x, y in zip(*line.get_data(), strict=True)]


def has_cross_entry(drawn: Figure) -> bool:
    return "at the lower edge" in texts(drawn)


def test_notes_stand_under_their_grids_heading(frame: pd.DataFrame, sweep: pd.DataFrame) -> None:
    assert projected.note(common.where(frame, grid="main")) == "A note about the main grid."
    document = projection.table(frame, PUBLISHED)
    _, _, after = document.partition("## The published point")
    assert after.partition("|")[0].strip().endswith("A note about the main grid.")
    _, _, after = document.partition(f"## {projection.SWEEPS['split']}")
    assert after.partition("|")[0].strip() == "A note about splitting."
    assert document.count("A note about") == 2
    notes = projection_spec.load(ROOT / "experiments/scaling.yaml").notes
    text = scaling.table(sweep, PUBLISHED)
    assert text.partition(f"## {scaling.GRIDS['dp']}\n")[2].strip().startswith(notes["dp"])
    assert notes["tp"] not in text, "a grid that is not there"
    assert projected.note(sweep.assign(note=None)) == ""


def test_a_case_without_a_number_has_a_cross(frame: pd.DataFrame) -> None:
    drawn = projection.figure(frame, PUBLISHED)
    main = common.where(frame, grid="main")
    expected = len(projected.numberless(main))
    assert expected == len(main.loc[main["status"].isin(["does not fit", "not possible"])]) > 2
    found = crosses(drawn)
    assert len(found) == expected
    assert len(set(found)) > 1
    assert "at the lower edge: not possible or does not fit" in texts(drawn)
    assert not overlaps(drawn)
    whole = frame.loc[~((frame["grid"] == "main") & (frame["status"] != "done"))]
    control = projection.figure(whole, PUBLISHED)
    assert crosses(control) == []
    assert not has_cross_entry(control)


def test_crosses_of_a_sweep_do_not_hide_each_other(sweep: pd.DataFrame) -> None:
    assert not projected.numberless(sweep).size
    assert crosses(scaling.figure(sweep, PUBLISHED)) == []
    gone = (sweep["dp"] == 8) & (sweep["kind"] == "projected")
    first = sweep.loc[gone].drop_duplicates("system").assign(status="does not fit", quantity=None, value=np.nan)
    drawn = scaling.figure(pd.concat([sweep.loc[~gone], first]), PUBLISHED)
    found: list[Any] = crosses(drawn)
    systems = len(common.systems(sweep))
    assert len(found) == 2 * systems, "in the panel of the step and in that of MFU"
    assert {x for x, _ in found} == {64.0}
    assert len({y for _, y in found}) == systems
    assert has_cross_entry(drawn)


def test_tables_and_figures_survive_without_numbers(frame: pd.DataFrame, sweep: pd.DataFrame, tmp_path: Path) -> None:
    for name, table in (("projection", frame), ("scaling", sweep)):
        without_numbers(name, table, tmp_path)
        without_numbers(name, table, tmp_path, "failed")
        readable(name, table)


def sticks_out(drawn: Figure) -> bool:
    """Whether anything is outside of the page, which is saved at the figure's exact size."""
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    box, (width, height) = drawn.get_tightbbox(canvas.get_renderer()), drawn.get_size_inches()
    slack = 0.02
    return box.x0 < -slack or box.y0 < -slack or box.x1 > width + slack or box.y1 > height + slack


def test_nothing_of_the_figure_is_cut_off(frame: pd.DataFrame) -> None:
    assert not sticks_out(projection.figure(frame, PUBLISHED))
    wide = projection.figure(frame, PUBLISHED)
    wide.legend(handles=[style.patch("a long name " * 20, (0, 0, 0))], loc="outside lower center")
    assert sticks_out(wide)
