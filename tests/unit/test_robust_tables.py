"""From run folders in any state to tables and figures: a word in every cell that has no number, and no crash."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib import colors
from matplotlib.figure import Figure
from matplotlib.text import Text

from impl.errors import ConfigError
from impl.harness import experiments
from impl.harness.experiments import Experiment, PrecisionExperiment, StepTimeExperiment
from impl.harness.pipeline_experiment import PipelineExperiment
from impl.harness.run import Run
from impl.harness.spec import parse
from impl.harness.tidy import collect, read_record
from paper_figures import clear_lines, common, markdown, pipelines, render, statistics, step_time, style
from paper_figures.__main__ import main, modules
from tests.unit import fake_runs
from tests.unit.test_figures import texts
from tests.unit.test_render import WORST, Page, checked
from tests.unit.test_tables import cells

ROOT = Path(__file__).parents[2]
PUBLISHED = pd.concat(pd.read_csv(ROOT / "results/published" / f"{name}.csv") for name in ("canzona", "rotation"))
MODULES = modules()
PIPELINES = ("no_stash", "rotation", "staleness", "sweep")
"""``rotation_full`` is shown as ``rotation``, ``rotation_ablation`` and ``stage_aware`` as ``no_stash``."""
KINDS = ("step_time", "generality", "precision", "pipeline", "processes")
TABLES = {"pipeline": PIPELINES, "processes": ("pipeline_time",)}
"""The modules that show a kind of experiment; other kinds have the module of their name."""
NAMES = (WORST, "muon+ (ns=5)", r"$\frac$ *x* [y](z)", "`a` __b__")
MESH = [{"dp": 2, "tp": 1}]


def experiment(kind: str, *, odd_names: bool = False) -> Experiment:
    """A small experiment of ``kind``: one mesh with five repetitions, or three seeds."""
    lines = [{**s, "name": NAMES[i] if odd_names else s["name"]} for i, s in enumerate(fake_runs.SYSTEMS)]
    if kind in ("step_time", "generality"):
        data = fake_runs.step_time_data(meshes=MESH, repetitions=5) | {"systems": lines}
        if kind == "generality":
            data["optimizers"] = [{"id": "soap", "name": WORST if odd_names else "SOAP"}]
        return parse(StepTimeExperiment, data)
    if kind == "precision":
        data = fake_runs.precision_data(meshes=MESH, seeds=[0, 1, 2], base={"steps": 4}) | {"systems": lines}
        return parse(PrecisionExperiment, data)
    grid, base = {"stages": [8]}, {"steps": 100}
    if kind == "processes":
        grid, base = {"stages": [2], "methods": ["adamw", "rotation"]}, {"steps": 20, "runtime": "processes"}
    data = fake_runs.pipeline_data(grids=[grid], base=base)
    data["tuned"] = [{"name": name, "stages": p, "lr": 4e-3} for name in ("adamw", "muon", "rotation") for p in (2, 8)]
    found = enumerate(data["methods"])
    data["methods"] = [{**m, "name": f"{NAMES[i % 4]}{i}" if odd_names else m["name"]} for i, m in found]
    return parse(PipelineExperiment, data)


def write(made: Experiment, folder: Path, run: Run, **changed: Any) -> Path:
    """Write the record of a run that is done."""
    if isinstance(made, StepTimeExperiment):
        return fake_runs.step_time_run(folder, run, **changed)
    return (fake_runs.precision_run if isinstance(made, PrecisionExperiment) else fake_runs.pipeline_run)(
        folder, run, **changed
    )


def nulls(data: Any) -> Any:
    """Plain data in which no number is finite, as a record writes them."""
    if isinstance(data, dict):
        return {key: nulls(value) for key, value in data.items()}
    if isinstance(data, list):
        return [nulls(value) for value in data]
    return None if isinstance(data, float) else data


def all_diverged(made: Experiment, folder: Path, run: Run) -> None:
    target = write(made, folder, run, status="diverged", error="loss is nan at step 1")
    manifest = json.loads((target / "manifest.json").read_text())
    (target / "manifest.json").write_text(json.dumps({**manifest, "result": None}))
    rows = (target / "metrics.jsonl").read_text().splitlines()
    (target / "metrics.jsonl").write_text("".join(json.dumps(nulls(json.loads(row))) + "\n" for row in rows))


def cut_short(made: Experiment, folder: Path, run: Run) -> None:
    target = write(made, folder, run)
    (target / "metrics.jsonl").write_text((target / "metrics.jsonl").read_text()[:-20])


def cut_short_and_unfinished(made: Experiment, folder: Path, run: Run) -> None:
    cut_short(made, folder, run)
    (folder / run.id / "manifest.json").unlink()


def no_text(made: Experiment, folder: Path, run: Run) -> None:
    (write(made, folder, run) / "metrics.jsonl").write_bytes(b"\xff\xfe{}\n")


def half_a_manifest(made: Experiment, folder: Path, run: Run) -> None:
    (write(made, folder, run) / "manifest.json").write_text('{"status": "do')


def foreign_manifest(made: Experiment, folder: Path, run: Run) -> None:
    (write(made, folder, run) / "manifest.json").write_text('{"status": "done", "result": [1], "git": 3}')


def nothing(made: Experiment, folder: Path, run: Run) -> None:
    pass


STATES: dict[Callable[..., None], str] = {
    all_diverged: "diverged",
    nothing: "missing",
    cut_short: "corrupt",
    cut_short_and_unfinished: "unfinished",
    no_text: "corrupt",
    half_a_manifest: "corrupt",
    foreign_manifest: "corrupt",
}


def frame(made: Experiment, folder: Path, state: Callable[..., None] = write) -> pd.DataFrame:
    """The tidy table of an experiment all of whose runs are in one state, as it is read again."""
    folder.mkdir(exist_ok=True)
    for run in made.runs("ci"):
        state(made, folder, run)
    collect(made, "ci", folder).to_parquet(folder / "tidy.parquet")
    return pd.read_parquet(folder / "tidy.parquet")


def rendered(name: str, table: pd.DataFrame, out: Path) -> str:
    """The document of a table; its page and LaTeX are written and checked."""
    text = MODULES[name].table(table, PUBLISHED)
    render.write(text, out)
    checked(out.with_suffix(".tex").read_text())
    assert Page(out.with_suffix(".html").read_text()).loaded == []
    assert not re.search(r"\bnan\b(?! at step)", text.replace("loss is nan", ""))
    return text


def drawn(name: str, table: pd.DataFrame) -> Figure:
    """The figure of a table, laid out as it is saved; it must be readable."""
    figure = MODULES[name].figure(table, PUBLISHED)
    style.take_literally(figure)
    figure.draw_without_rendering()
    readable(figure)
    return figure


def readable(figure: Figure) -> None:
    """Fail unless a figure has the width of one or two columns and no text below 6 pt."""
    assert figure.get_size_inches()[0] in (style.ONE_COLUMN_IN, style.TWO_COLUMNS_IN)
    assert not {text.get_text() for text in found(figure) if text.get_fontsize() < 6}


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        *[(s, k) for s in (all_diverged, nothing, cut_short, cut_short_and_unfinished) for k in KINDS],
        *[(s, "precision") for s in (no_text, half_a_manifest, foreign_manifest)],
    ],
)
def test_runs_in_any_state_give_tables_with_that_word_and_no_number(tmp_path, kind, state):
    table, word = frame(experiment(kind), tmp_path, state), STATES[state]
    assert set(table["status"]) == {word}
    for name in TABLES.get(kind, (kind,)):
        text = rendered(name, table, tmp_path / f"{name}.md")
        main = MODULES[name].main_table(table)
        counts = {cell for row in main.splitlines()[2:] for cell in re.findall(r"(?<=\| )\s*\d+/\d+(?= )", row)}
        assert all(count.strip().startswith("0/") for count in counts), main
        assert counts or name == "sweep"
        assert main.count(word) >= len(main.splitlines()) - 2, main
        assert "**" not in main
        assert text.count(f"**{word}**") >= len(set(table["run"]))
    if state in (all_diverged, nothing):
        for name in TABLES.get(kind, (kind,)):
            assert word in texts(drawn(name, table)) or name in ("rotation", "staleness")


@pytest.mark.parametrize("kind", KINDS)
def test_any_display_name_is_shown_as_it_is(tmp_path, kind):
    table = frame(experiment(kind, odd_names=True), tmp_path)
    names = {str(name) for (name,) in common.distinct(table, "system_name")}
    assert len(names) > 1
    for name in TABLES.get(kind, (kind,)):
        text = rendered(name, table, tmp_path / f"{name}.md")
        shown = set(Page(render.html(text)).cells)
        assert names <= shown
        grids = render.tables(text)
        assert {render.plain(cell) for grid in grids for row in grid.rows for cell in row} >= names
        written = texts(drawn(name, table))
        assert all(name in written for name in names) or name == "staleness", "which has no names in its figure"
    assert all(re.fullmatch(r"[a-z0-9-]+", run) for run in set(table["run"]))


def test_without_taking_texts_literally_a_name_would_be_a_formula():
    figure = Figure()
    figure.text(0.5, 0.5, NAMES[2])
    with pytest.raises(ValueError, match="frac"):
        figure.draw_without_rendering()
    axis = figure.add_subplot()
    axis.set(yscale="log", ylim=(1e-4, 1))
    style.take_literally(figure)
    figure.draw_without_rendering()
    assert any(text.get_text().startswith("$\\mathdefault{10") and text.get_parse_math() for text in found(figure))


def found(figure: Figure) -> list[Text]:
    """All texts of a figure that are in view and say something."""
    lines = [line for axes in figure.axes for line in (axes.xaxis, axes.yaxis)]
    hidden = {tick.label1 for line in lines for tick in line.get_major_ticks()}
    hidden -= {tick.label1 for line in lines for tick in line._update_ticks()}  # type: ignore[attr-defined]
    every = [text for text in figure.findobj(Text) if isinstance(text, Text) and text not in hidden]
    return [text for text in every if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("bad", ["muon+ (ns=5)", "../x", "A", "", "a_b", "x\n"])
@pytest.mark.parametrize(
    ("kind", "key"), [("step_time", "systems"), ("generality", "optimizers"), ("pipeline", "methods")]
)
def test_an_id_that_names_no_folder_is_refused_and_a_name_that_tells_nothing_apart(kind, key, bad):
    data = experiment(kind).model_dump(mode="json", exclude_none=True)
    with pytest.raises(ConfigError) as refused:
        parse(type(experiment(kind)), {**data, key: [{**data[key][0], "id": bad}, *data[key][1:]]})
    assert f"{key}.0.id: write lower-case letters, digits and hyphens" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_two_lines_with_one_name_are_refused_and_a_name_is_one_line():
    data = fake_runs.pipeline_data()
    first, second, *others = data["methods"]
    for name, said in ((first["name"], "is listed twice"), (" ", "one line of text"), ("a\nb", "one line of text")):
        with pytest.raises(ConfigError, match=said):
            parse(PipelineExperiment, data | {"methods": [first, second | {"name": name}, *others]})


def test_a_display_name_of_an_optimizers_file_reaches_the_table_and_not_the_path(tmp_path):
    (tmp_path / "optimizers").mkdir()
    file = {"name": "soap", "display_name": "muon+ (ns=5)", "experiments": {"step_time": None}}
    (tmp_path / "optimizers" / "soap.yaml").write_text(json.dumps(file))
    (tmp_path / "step_time.yaml").write_text(json.dumps(fake_runs.step_time_data(meshes=MESH, repetitions=5)))
    made = experiments.load(tmp_path / "step_time.yaml")
    table = frame(made, tmp_path / "runs")
    assert {"muon+ (ns=5)", "muon"} == {name for name, _ in common.optimizers(table)}
    assert cells(step_time.main_table(table), "DP2 x TP1, muon+ (ns=5)", "Canzona")[-1] == "5/5"
    assert any(run.startswith("soap-dp2") for run in table["run"])


# one seed of three


@pytest.mark.parametrize("kind", ["precision", "pipeline", "processes"])
def test_one_failed_seed_of_three_is_counted_and_nothing_is_bold(tmp_path, kind):
    made, said = experiment(kind), "rank 1: `a` | *b* <c> $d$"
    whole = frame(made, tmp_path / "whole")
    lines = {run.system.id for run in made.runs("ci") if run.system}
    for run in made.runs("ci"):
        if "-s1-" in run.id:
            fake_runs.write(tmp_path / "part", run, {}, [], status="failed", error=said)
        else:
            write(made, tmp_path / "part", run)
    part = collect(made, "ci", tmp_path / "part")
    for name in TABLES.get(kind, (kind,)):
        main = MODULES[name].main_table(part)
        assert main.count("2/3") >= len(lines), main
        assert "**" not in main
        assert f": failed: {said}" in Page(render.html(rendered(name, part, tmp_path / "t.md"))).text
    if kind == "pipeline":
        assert "**" in MODULES["rotation"].main_table(whole), "the control"


# bold


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


def test_holm_is_the_step_down_correction():
    assert statistics.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert statistics.holm([0.5, 0.9]) == [1.0, 1.0]
    assert statistics.holm([]) == []


@pytest.mark.parametrize(
    ("lines", "best"),
    [
        ([seeds(10, 11, 12.1), seeds(20, 21.1, 22)], 0),
        ([seeds(20, 21.1, 22), seeds(10, 11, 12.1), seeds(30, 31, 32.1)], 1),
        ([seeds(10, 11), seeds(20, 21.1)], None),
        ([seeds(10, 11, 12.1), seeds(20, 21.1)], None),
        ([seeds(10, 15, 20), seeds(11, 14, 22)], None),
        ([seeds(10, 11, 12.1), seeds(20, 21.1, 22), seeds(10.1, 10.9, 12.2)], None),
        ([{0: 10, 1: 11, 2: 12.1}, {2: 20, 3: 21.1, 4: 22}], None),
        ([seeds(10, 11, 12)], None),
        ([seeds(10, 10, 10), seeds(10, 10, 10)], None),
    ],
)
def test_a_line_is_the_smallest_only_by_test_against_every_other(lines, best):
    assert statistics.smallest(lines) == best


def test_correction_for_many_lines_can_take_the_bold_away():
    """One rival at p = 0.03 leaves the line bold, five such rivals do not."""
    best, rival = seeds(1.0, 1.1, 0.9, 1.0), seeds(1.5, 1.2, 1.3, 1.6)
    p = statistics.paired_difference(list(best.values()), list(rival.values())).p
    assert 0.01 < p < 0.05
    assert statistics.smallest([best, rival]) == 0
    assert statistics.smallest([best, *[rival] * 5]) is None


def test_the_shortest_needs_five_repetitions_and_every_interval_below_one():
    fast, slow = seeds(1.0, 1.1, 1.05, 1.02, 1.07), seeds(2.0, 2.1, 2.2, 2.05, 2.15)
    assert statistics.shortest([slow, fast]) == 1
    assert statistics.shortest([seeds(*list(slow.values())[:4]), seeds(*list(fast.values())[:4])]) is None
    assert statistics.shortest([slow, fast, seeds(1.01, 1.09, 1.06, 1.01, 1.08)]) is None


def test_noise_is_seldom_bold():
    """Six lines that are all the same: a best one is found in no more of the draws than the level says."""
    draws = np.random.default_rng(0).normal(100, 5, (200, 6, 3))
    assert sum(statistics.smallest([seeds(*line) for line in one]) is not None for one in draws) <= 10


def test_bold_cells_of_a_comparison_are_the_clear_ones(tmp_path):
    table = frame(experiment("pipeline"), tmp_path)
    lines = pipelines.lines(table)
    target = pipelines.common_target(lines)
    assert [line.system for line in clear_lines.fewest(lines, target)] == ["rotation"]
    assert [line.system for line in clear_lines.lowest(lines)] == ["rotation"]
    text = pipelines.comparison_table(lines, "adamw", target)
    assert text.count("**") == 4
    assert len({len(line) for line in text.splitlines()}) == 1, "padding"
    assert "Holm" in MODULES["rotation"].table(table, PUBLISHED)
    few = table.loc[table["seed"] < 2]
    assert "**" not in pipelines.comparison_table(pipelines.lines(few), "adamw", target)
    near = table.copy()  # a rival that is as good
    rotation, muon = (
        (table["system"] == name) & (table["quantity"] == "heldout_loss") for name in ("rotation", "muon")
    )
    near.loc[muon, "value"] = near.loc[rotation, "value"].to_numpy() * np.resize([1.001, 0.999], rotation.sum())
    assert "**" not in pipelines.comparison_table(pipelines.lines(near), "adamw", pipelines.common_target(lines))


def test_a_line_that_never_reaches_the_target_is_counted_with_all_its_updates(tmp_path):
    lines = pipelines.lines(frame(experiment("pipeline"), tmp_path))
    lowest = min(min(v for _, v in curve) for line in lines for curve in line.curves.values())
    low = lowest + 0.1
    reached = [line for line in lines if line.iterations_if_all(low)]
    assert [line.system for line in reached] == ["rotation"]
    assert clear_lines.fewest(lines, low) == reached
    assert clear_lines.fewest(lines, lowest) == [], "the best itself does not reach it with every seed"
    assert clear_lines.fewest(lines, float("nan")) == []


def test_bold_times_need_all_systems(tmp_path):
    table = frame(experiment("step_time"), tmp_path)
    assert step_time.fastest(table) == "canzona"
    assert step_time.main_table(table).count("**") == 2
    assert "Bonferroni" in step_time.table(table, PUBLISHED)
    assert step_time.fastest(table.loc[table["repetition"].isna() | (table["repetition"] < 4)]) is None
    bad = table.copy()
    bad.loc[bad["system"] == "asc", "status"] = "failed"
    assert step_time.fastest(bad) is None
    assert cells(step_time.comparison_table(bad), "DP2 x TP1", "ASC") == ["failed", "0/5", "failed"]


# records


def test_a_record_says_what_a_folder_holds(tmp_path):
    made = experiment("precision")
    first = made.runs("ci")[0]
    assert read_record(tmp_path / first.id).status == "missing"
    cut_short_and_unfinished(made, tmp_path, first)
    record = read_record(tmp_path / first.id)
    assert (record.status, len(record.rows)) == ("unfinished", 3)
    (tmp_path / first.id / "metrics.jsonl").write_text("[1]\n5\n{}\n")
    write(made, tmp_path, first)
    assert read_record(tmp_path / first.id).status == "done"
    with (tmp_path / first.id / "metrics.jsonl").open("a") as file:
        file.write("5\n")
    assert read_record(tmp_path / first.id).status == "corrupt"


@pytest.mark.parametrize("content", ["no rows", "half"])
def test_a_tidy_table_without_rows_or_half_of_one_is_a_clear_line(tmp_path, capsys, content):
    source = tmp_path / "step_time.parquet"
    frame(experiment("step_time"), tmp_path / "runs").iloc[:0].to_parquet(source)
    if content == "half":
        source.write_bytes(source.read_bytes()[:100])
    options = [
        "--in",
        str(source),
        "--published",
        str(ROOT / "results/published/canzona.csv"),
        "--out",
        str(tmp_path / "t"),
    ]
    for what in ("table", "figure"):
        assert main([what, "step_time", *options]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        assert str(source) in said


# planned and projected tables, without a number


KEYS = {
    *("dp", "tp", "gpus", "seed", "layer", "stage", "stages", "rows", "columns", "limit", "replay_limit", "alpha"),
    *("capacity_bytes", "sequence", "batch", "microbatches", "updates"),
}
"""Columns of numbers that say which case a row is."""


def without_numbers(name: str, table: pd.DataFrame, folder: Path, status: str | None = None) -> None:
    """Check a module's table and figure of ``table`` with nothing in its columns of numbers."""
    broken = table.copy()
    broken[[c for c in broken.select_dtypes("float") if c not in KEYS]] = float("nan")
    if status:
        broken["status"] = status
    assert f"{status or markdown.DASH} |" in rendered(name, broken, folder / "t.md")
    drawn(name, broken)


@pytest.mark.parametrize(
    ("name", "status"), [("balance", None), ("hessian", None), ("validation", None), ("hessian", "failed")]
)
def test_a_reference_table_without_numbers_is_shown(tmp_path, name, status):
    without_numbers(name, pd.read_csv(ROOT / "results" / "laptop" / f"{name}.csv"), tmp_path, status)


# figures


def test_the_check_of_a_figure_finds_what_is_wrong():
    readable(Figure(figsize=(style.ONE_COLUMN_IN, 2)))
    with pytest.raises(AssertionError):
        readable(Figure(figsize=(5, 2)))
    small = Figure(figsize=(style.ONE_COLUMN_IN, 2))
    small.text(0.5, 0.5, "small", fontsize=5.5)
    with pytest.raises(AssertionError):
        readable(small)


def test_a_saved_page_is_as_wide_as_its_figure_and_holds_all_of_it(tmp_path):
    table = frame(experiment("pipeline"), tmp_path)
    figure = MODULES["no_stash"].figure(table, PUBLISHED)
    style.save(figure, tmp_path / "f.png")
    box = re.search(rb"/MediaBox\s*\[\s*([\d. ]+)\]", (tmp_path / "f.pdf").read_bytes())
    assert box
    assert float(box[1].split()[2]) == pytest.approx(72 * style.TWO_COLUMNS_IN)
    edge = figure.bbox
    assert all(edge.x0 <= b.x0 and b.x1 <= edge.x1 for b in (text.get_window_extent() for text in found(figure)))


def lightness(colour: style.Colour) -> float:
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colors.to_rgb(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_colours_beyond_the_palette_differ_in_lightness():
    """What a colour-blind reader sees is lightness: those after the ten of the palette grow lighter one by one."""
    pairs = [(str(i), str(i)) for i in range(16)]
    extra = [lightness(colour) for colour in list(style.palette(pairs, ()).values())[10:]]
    assert extra == sorted(extra)
    assert min(np.diff(extra)) > 0.02
