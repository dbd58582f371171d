"""The pipeline projection: its table, answers to claims, cells that do not fit, and the commands."""

import json
import math
import re
from pathlib import Path

import pandas as pd
import pytest

from impl.__main__ import main
from impl.errors import ConfigError
from impl.harness.pipeline_answers import PipelineGrid, machine
from impl.harness.pipeline_projection import COLUMNS, of_claim, rows, table
from impl.harness.pipeline_projection_spec import Cell, PipelineProjectionSpec, load
from impl.harness.spec import load_yaml, parse
from impl.models import catalogue
from paper_figures import common, pipeline_claims, pipeline_projection, style
from tests.unit.test_robust_tables import drawn as readable
from tests.unit.test_robust_tables import without_numbers

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "experiments/pipeline_projection.yaml"
PUBLISHED = ROOT / "results/published/rotation.csv"


def small() -> PipelineProjectionSpec:
    """The experiment cut down to one model on a few cards, and a sixth of its claims."""
    data = load_yaml(CONFIG)
    data["cases"] = [c for c in data["cases"] if c["id"] == "llama-7b"]
    data["cases"][0] |= {"methods": ["1f1b-flush", "pipedream", "rotation", "rotation-uni-1st"]}
    data["largest"] |= {"hardware": ["rtx3090", "a100-80"], "models": ["llama-7b"], "stages": [4, 8]}
    data["claims"] = [c for c in data["claims"] if c["id"] in ("R11", "R12", "R21") and "fp32" not in str(c)]
    data["tiers"] = {"laptop": {"cases": ["llama-7b"]}}
    return parse(PipelineProjectionSpec, data)


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return table(list(rows(small(), "laptop")))


def cell(frame: pd.DataFrame, method: str, policy: str, quantity: str) -> pd.DataFrame:
    return common.where(frame, sweep="case", method=method, policy=policy, quantity=quantity)


def test_the_file_of_the_experiment_is_complete():
    spec = load(CONFIG)
    published = pd.read_csv(PUBLISHED)
    for claim in spec.claims:
        assert len(common.where(published, id=claim.id, quantity=claim.quantity)) == 1, claim.quantity
    assert {claim.id for claim in spec.claims} == set(pipeline_projection.CLAIMS)
    for case in spec.cases:
        machine(case.hardware, case.stages)
        assert catalogue.load(case.model).arch.num_hidden_layers >= case.stages
    assert {t for t, part in spec.tiers.items() if part.claims} == {"laptop", "gpu1", "node8", "cluster"}


def test_arithmetic_of_the_reasons():
    flops = 6 * catalogue.load("llama-7b").parameter_count() * 2048 * 18.7
    assert flops == pytest.approx(1.5e15, rel=0.05)
    peak = 8 * machine("rtx3090x8", 8).hardware.spec.device.peak_flops["bfloat16"]  # type: ignore[attr-defined]
    assert peak == pytest.approx(0.57e15, rel=0.01)
    implied = (1 - 0.543) / (1 - 0.716)
    assert implied == pytest.approx(1.61, abs=0.005)
    assert catalogue.load("llama-65b").parameter_count() == pytest.approx(65.2e9, rel=0.002)  # LLaMA, table 2
    assert catalogue.load("llama-95m").parameter_count() == pytest.approx(95.6e6, rel=0.01)


def test_every_number_has_a_kind_and_bands_hold_their_value(frame):
    assert list(frame.columns) == list(COLUMNS)
    assert set(frame["kind"]) == {"planned", "projected"}
    times = common.where(frame, sweep="case", kind="projected", status="done")
    known = times[times["value"].notna()]
    assert len(known)
    assert ((known["low"] <= known["value"]) & (known["value"] <= known["high"])).all()
    rates = common.where(known, quantity="samples_per_s")
    assert (rates["low"] < rates["high"]).all()


def test_a_cell_that_does_not_fit_has_a_reason_and_no_times(frame):
    misfits = common.where(frame, sweep="case", status="does not fit")
    assert misfits["reason"].str.match(r"needs \d+\.\d GB on stage \d+, the card has 25\.0 GB").all()
    assert common.where(misfits, kind="projected")["value"].isna().all()
    assert common.where(misfits, quantity="memory")["value"].notna().all()
    fitting = common.where(frame, sweep="case", status="done")
    assert common.where(fitting, quantity="samples_per_s")["value"].notna().all()
    card = common.numbers(cell(frame, "pipedream", "none", "card"), "value")[0]
    for (method, policy), own in common.where(frame, quantity="memory").groupby(["method", "policy"]):
        misfit = set(own["status"]) == {"does not fit"}
        assert bool(own["value"].max() > card) is misfit, (method, policy)


def test_parts_add_up_to_the_fullest_stage(frame):
    parts = cell(frame, "rotation", "none", "memory_part")
    whole = cell(frame, "rotation", "none", "memory")
    assert common.where(parts, part="host")["value"].sum() == 0
    assert parts["value"].sum() == pytest.approx(whole["value"].max())


def test_rotation_costs_more_than_pipedream_and_ratios_are_paired(frame):
    ratio = cell(frame, "rotation-uni-1st", "stage-cpu", "ratio").iloc[0]
    own, base = (cell(frame, m, "stage-cpu", "update_s").iloc[0] for m in ("rotation-uni-1st", "pipedream"))
    assert ratio["low"] > 1
    assert ratio["value"] == pytest.approx(own["value"] / base["value"])
    # paired: narrower than the quotient of the ends of both bands
    assert ratio["high"] / ratio["low"] < (own["high"] / base["low"]) / (own["low"] / base["high"])
    assert cell(frame, "pipedream", "stage-cpu", "ratio")[["value", "low", "high"]].to_numpy() == pytest.approx(1.0)


def test_ratios_are_to_the_fastest_policy_under_which_pipedream_fits(frame):
    """Without recomputation PipeDream does not fit, and 1F1B does: it has a ratio all the same."""
    assert set(cell(frame, "pipedream", "none", "update_s")["status"]) == {"does not fit"}
    own, base = (cell(frame, *c, "update_s").iloc[0] for c in (("1f1b-flush", "none"), ("pipedream", "stage-cpu")))
    ratio = cell(frame, "1f1b-flush", "none", "ratio").iloc[0]
    assert ratio["value"] == pytest.approx(own["value"] / base["value"])
    line = next(x for x in pipeline_projection.main_table(frame).splitlines() if "1F1B" in x)
    shown = [x.strip() for x in line.split("|")]
    assert f"{ratio['value']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" in shown
    bubble, exposed = (cell(frame, "1f1b-flush", "none", q).iloc[0] for q in ("bubble", "exposed_s"))
    for found, factor, digits in ((bubble, 100, 0), (exposed, 1e3, 1)):
        numbers = [f"{factor * found[k]:.{digits}f}" for k in ("value", "low", "high")]
        assert "{} [{}, {}]".format(*numbers) in shown


def test_of_several_policies_that_fit_the_fastest_one_is_the_reference():
    data = load_yaml(CONFIG)
    grid = PipelineGrid(parse(PipelineProjectionSpec, data))
    case = "llama-95m"
    times = {
        policy: own.update_s[0]
        for policy in ("none", "stage")
        if (own := grid.answer(Cell(case=case, method="pipedream", policy=policy)).projection)
    }
    reference = grid.reference(case)
    assert len(times) == 2
    assert reference is not None
    assert reference.update_s[0] == min(times.values())
    # turned round, as where the slower one comes first
    data["policies"] = data["policies"][::-1]
    again = PipelineGrid(parse(PipelineProjectionSpec, data)).reference(case)
    assert again is not None
    assert again.update_s[0] == min(times.values())
    assert grid.reference("llama-7b-fp32") is None
    assert grid.ratio(Cell(case="llama-7b-fp32", method="pipedream", policy="stage")) is None


def test_the_gradient_norm_is_said_to_be_a_large_part_of_an_update(frame):
    rates = common.where(frame, sweep="case", quantity="norm_share", status="done")
    shares = dict(zip(rates["method"] + "/" + rates["policy"], rates["value"], strict=True))
    assert all(0 < share < 1 for share in shares.values())
    assert shares["pipedream/stage-cpu"] > 5 * shares["rotation-uni-1st/stage-cpu"]  # matrices have a plain norm
    shown = [shares[key] for key in ("1f1b-flush/none", "pipedream/stage-cpu", "rotation-uni-1st/stage-cpu")]
    assert f"from {min(shown):.0%} to {max(shown):.0%} here" in pipeline_projection.norm_note(frame)
    assert pipeline_projection.norm_note(frame) in pipeline_projection.table(frame, pd.read_csv(PUBLISHED))
    nothing = common.where(frame, method="pipedream", policy="none")
    assert pipeline_projection.norm_note(nothing) == ""


def test_the_bytes_of_the_norm_are_those_of_the_machine():
    on = machine("rtx3090x8", 8)
    times = on.norm(10**9, exact=True).seconds[0] / on.norm(10**9).seconds[0]
    exact, plain = pipeline_projection.EXACT_BYTES, pipeline_projection.PLAIN_BYTES
    assert times == pytest.approx(exact / plain)
    assert on.norm(10**9).seconds[0] / on.copy(10**9, "device").seconds[0] == pytest.approx(plain / 2)  # reads, writes


def test_reasons_give_the_shares_of_the_norm_as_projected():
    spec = load(CONFIG)
    grid = PipelineGrid(spec)
    claims = [claim for claim in spec.claims if "exact gradient norm" in claim.reason]
    assert [claim.id for claim in claims] == ["R6", "R12", "R16"]
    for claim in claims:
        assert claim.baseline is not None
        assert claim.of is not None
        found = [grid.answer(cell).projection for cell in (claim.baseline, claim.of)]
        shares = [round(100 * own.norm_share[0]) for own in found if own]
        words = claim.reason.partition("exact gradient norm")[2]
        assert [int(n) for n in re.findall(r"(\d+) % (?:of|with)", words)] == shares, claim.id


def test_the_row_that_comes_near_a_published_memory_is_called_no_agreement():
    near = [c for c in load(CONFIG).claims if c.id == "R11" and c.of is not None and c.of.policy == "stage-cpu"]
    assert len(near) == 1
    assert "no agreement" in near[0].reason
    assert "after the published number was known" in near[0].reason


def test_synchronous_schedules_have_no_stash_to_put_elsewhere(frame):
    assert cell(frame, "1f1b-flush", "stage-cpu", "memory").empty
    assert not cell(frame, "pipedream", "stage-cpu", "memory").empty


def test_largest_microbatches_grow_with_card_and_stages(frame):
    found = common.where(frame, sweep="largest", method="1f1b-flush")
    most = {(r["hardware"], r["stages"]): r["value"] for r in found.to_dict("records")}
    assert most["a100-80", 8] > most["rtx3090", 8] > most["rtx3090", 4] == 0
    zero = common.where(frame, sweep="largest", value=0.0)
    assert set(zero["status"]) == {"does not fit"}


def test_claims_stand_beside_what_was_published(frame):
    text = pipeline_claims.claims_table(frame, pd.read_csv(PUBLISHED))
    memory = [line for line in text.splitlines() if "R11" in line]
    need = common.numbers(cell(frame, "pipedream", "none", "memory"), "value").max() / 1e9
    ours = [line.split("|")[4:7] for line in memory if "22.1 GB" in line and "nothing recomputed" in line]
    assert [[x.strip() for x in line] for line in ours] == [
        ["22.1 GB", f"{need:.3g} GB [planned]", f"{need / 22.1:.2f}"]
    ]
    rates = [line for line in text.splitlines() if "R12" in line]
    assert [line.split("|")[5].strip() == "does not fit" for line in rates] == [True, True, False, False]
    assert all(line.count("–") for line in text.splitlines() if "R21" in line)


def test_a_claim_about_a_pair_needs_a_baseline():
    spec = small()
    of = Cell(case="llama-7b", method="pipedream", policy="stage")
    broken = spec.claims[0].model_copy(update={"measure": "memory_saved", "baseline": None, "of": of})
    with pytest.raises(ConfigError, match="needs a baseline"):
        list(of_claim(PipelineGrid(spec), broken))


def test_table_and_figure_show_words_where_nothing_fits(frame, tmp_path):
    published = pd.read_csv(PUBLISHED)
    text = pipeline_projection.table(frame, published)
    line = next(x for x in pipeline_projection.main_table(frame).splitlines() if "Rotation bi/2nd" in x)
    assert "does not fit under any policy" in line
    for heading in ("Largest microbatches", "Beside published numbers", "What the times rest on", "What is in memory"):
        assert f"## {heading}" in text
    assert "nan" not in text
    figure = pipeline_projection.figure(frame, published)
    words = [t.get_text() for axes in figure.axes for t in axes.texts]
    assert words == ["does not fit"]
    bars = len(figure.axes[0].containers)
    assert bars >= 3  # a bar, and with each an error bar
    style.save(figure, tmp_path / "figure")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"reference": "pipedreem"}, "unknown method 'pipedreem'"),
        ({"capacity_bytes": 0}, "capacity_bytes"),
        ({"sweeps": 1}, "unknown setting 'sweeps'"),
    ],
)
def test_a_wrong_file_is_one_line(change, words, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text(json.dumps({**load_yaml(CONFIG), **change}))
    with pytest.raises(ConfigError, match=words):
        load(path)


PROJECT = ["project-pipeline", "--model", "llama-7b", "--stages", "8", "--batch", "8", "--sequence", "512"]
PROJECT += ["--hardware", "rtx3090x8", "--dtype", "bfloat16", "--json"]


def test_one_pipeline_that_fits(capsys, tmp_path):
    chart, trace = tmp_path / "chart.png", tmp_path / "trace.json"
    files = ["--draw", str(chart), "--trace", str(trace)]
    assert main([*PROJECT, "--method", "pipedream", "--recompute", "stage", "--stash-on-cpu", *files]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["kind"] == "projected"
    low, high = found["band"]["samples_per_s"]
    assert low < found["samples_per_s"] < high
    assert found["samples_per_s"] == pytest.approx(8 / found["update_s"])
    assert found["ratio_to_pipedream"] == pytest.approx(1.0)
    assert found["ratio_reason"] is None
    assert sum(found["evidence"].values()) == pytest.approx(1.0)
    assert len(found["memory_bytes"]) == 8
    for stage in found["memory_bytes"]:
        parts = sum(v for k, v in stage.items() if k not in ("total", "host"))
        assert parts == pytest.approx(stage["total"])
    assert chart.stat().st_size > 5000
    assert json.loads(trace.read_text())["traceEvents"]


def test_no_ratio_to_a_pipedream_that_does_not_fit(capsys):
    own = ["--method", "1f1b-flush"]
    assert main([*PROJECT, *own]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["ratio_to_pipedream"] is None
    assert "ratio_to_pipedream" not in found["band"]
    assert found["ratio_reason"].startswith("PipeDream with these settings does not fit: needs ")
    assert main([*PROJECT[:-1], *own]) == 0
    assert "none: PipeDream with these settings does not fit" in capsys.readouterr().out


def test_one_pipeline_that_does_not_fit(capsys):
    assert main([*PROJECT, "--method", "basis-rotation"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["reason"].endswith("on stage 0, the card has 25.0 GB")
    assert [found[name] for name in ("samples_per_s", "update_s", "bubble", "exposed_communication_s")] == [None] * 4
    assert found["memory_bytes"][0]["total"] > 25e9
    assert main([*PROJECT[:-1], "--method", "basis-rotation"]) == 0
    assert "does not fit: needs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hardware", "rtx3090x4"], "write rtx3090x8"),
        (["--hardware", "a100-40"], "a100-40"),
        (["--hardware", "rtx4090x8"], "unknown hardware"),
        (["--method", "pipedreem"], "did you mean 'pipedream'"),
        (["--recompute", "some"], "recompute"),
        (["--dtype", "float16"], "bfloat16"),
        (["--stash-on-cpu"], "stash_on_cpu needs recompute=stage"),
        (["--method", "basis-rotation", "--trace", "x.json"], "nothing to trace"),
        (["--set", "perod=3"], "unknown setting"),
    ],
)
def test_bad_input_is_one_line(options, words, capsys):
    assert main([*PROJECT, *options]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_the_command_writes_the_table(tmp_path, capsys):
    data = load_yaml(CONFIG)
    data["tiers"] = {"ci": {"cases": ["llama-7b-fp32"], "largest": False, "claims": False}}
    path = tmp_path / "experiment.yaml"
    path.write_text(json.dumps(data))
    assert main(["pipeline-projection", "--config", str(path), "--tier", "ci", "--out", str(tmp_path / "out")]) == 0
    found = pd.read_parquet(tmp_path / "out/pipeline_projection.parquet")
    assert set(found["case"]) == {"llama-7b-fp32"}
    assert len(pd.read_csv(tmp_path / "out/pipeline_projection.csv")) == len(found)
    assert not math.isnan(found["value"].max())
    assert "[projected, planned]" in capsys.readouterr().out
    assert main(["pipeline-projection", "--config", str(path), "--tier", "laptop", "--out", str(tmp_path)]) == 2


def test_table_and_figure_survive_without_numbers(frame: pd.DataFrame, tmp_path: Path) -> None:
    without_numbers("pipeline_projection", frame, tmp_path)
    readable("pipeline_projection", frame)
