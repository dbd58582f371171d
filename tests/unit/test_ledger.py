"""The ledger of claims: its entries, what tables say about them, and the written rules for a verdict."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import yaml

from impl.errors import ConfigError
from impl.harness.experiments import all_runs
from impl.harness.tidy import collect
from impl.rotation.method import create_method
from paper_figures import (
    claims_of_delay,
    claims_of_engine,
    claims_of_hessian,
    claims_of_pipelines,
    claims_of_plans,
    claims_of_projection,
    ledger,
    ledger_document,
    ledger_figure,
    verdicts,
)
from paper_figures.__main__ import main
from paper_figures.findings import Answer, Finding, answers
from paper_figures.verdicts import NOT, REPRODUCED, SAME, UNTESTED, ClaimEntry
from tests.unit import fake_runs
from tests.unit.test_figures import overlaps, precision_frame, step_time_frame, texts
from tests.unit.test_methods import context

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "experiments" / "claims.yaml"
CLAIMS = {claim.id: claim for claim in verdicts.load(LEDGER)}
PUBLISHED = pd.concat([pd.read_csv(ROOT / "results" / "published" / f"{name}.csv") for name in ("canzona", "rotation")])
IDS = [*(f"C{i}" for i in range(1, 15)), *(f"R{i}" for i in range(1, 22))]
DELAYED = {
    "rotation": claims_of_delay.rotation,
    "staleness": claims_of_delay.staleness,
    "sweep": claims_of_delay.sweep,
    "stage_aware": claims_of_delay.stage_aware,
    "no_stash": claims_of_delay.no_stash,
    "rotation_ablation": claims_of_delay.rotation_ablation,
}


# entries


def published_row(claim: ClaimEntry) -> pd.DataFrame:
    rows = PUBLISHED.loc[PUBLISHED["id"] == claim.published_id]
    for column, value in (("quantity", claim.quantity), ("model", claim.model)):
        rows = rows if value is None else rows.loc[rows[column] == value]
    return rows


def disagreement(claim: ClaimEntry) -> str:
    """Return in what a claim differs from the published table, empty if in nothing."""
    rows = published_row(claim)
    if rows.empty:
        return f"{claim.id}: no such row"
    if claim.value is None and claim.unit == "":
        return ""  # a part that the published table has no number of
    if len(rows) > 1:
        return f"{claim.id}: {len(rows)} rows"
    row = rows.iloc[0]
    for name, own in (("value", claim.value), ("baseline_value", claim.baseline_value), ("unit", claim.unit or None)):
        theirs = None if pd.isna(row[name]) else row[name]
        if own != theirs:
            return f"{claim.id}: {name} {own!r}, published {theirs!r}"
    return ""


def test_every_published_claim_is_in_the_ledger_and_every_entry_agrees_with_it():
    assert list(dict.fromkeys(claim.published_id for claim in CLAIMS.values())) == IDS
    assert set(PUBLISHED["id"]) == set(IDS)
    assert [text for claim in CLAIMS.values() if (text := disagreement(claim))] == []
    numbers = PUBLISHED.dropna(subset=["value"])
    shown = {(c.published_id, c.value) for c in CLAIMS.values()}
    assert {(r.id, r.value) for r in numbers.itertuples()} <= shown, "a published number that no entry has"


def test_a_changed_number_is_found():
    assert "value 0.067" in disagreement(CLAIMS["C3"].model_copy(update={"value": 0.067}))
    assert "3 rows" in disagreement(CLAIMS["R4a"].model_copy(update={"quantity": None}))


def test_answers_name_experiments_functions_and_figures_that_exist():
    for claim in CLAIMS.values():
        for entry in claim.answers:
            assert (ROOT / "experiments" / f"{entry.experiment}.yaml").exists(), (claim.id, entry.experiment)
            assert callable(ledger.function(entry.found_by))
            assert importlib.import_module(f"paper_figures.{entry.experiment}").figure
    assert "claims" not in all_runs(ROOT / "experiments", "ci"), "the ledger is no experiment"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vlaue": 2}, "did you mean 'value'"),
        ({"answers": []}, "say in not_testable"),
        ({"answers": [{"experiment": "balance", "found_by": "claims_of_plans.balance", "setup": "same"}]}, "setup"),
        ({"compare": "effect", "value": None}, "needs value and baseline_value"),
        ({"id": "X1"}, "id"),
        ({"value": math.inf}, "value"),
    ],
)
def test_bad_entries_are_refused_in_one_line(tmp_path, change, message):
    entries = yaml.safe_load(LEDGER.read_text())
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump([entries[0] | change]))
    with pytest.raises(ConfigError, match=message) as caught:
        verdicts.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_id_twice_and_an_unknown_function_are_refused(tmp_path):
    path = tmp_path / "claims.yaml"
    path.write_text(yaml.safe_dump([yaml.safe_load(LEDGER.read_text())[0]] * 2))
    with pytest.raises(ConfigError, match="listed twice"):
        verdicts.load(path)
    for name, text in (("claims_of_plan.balance", "did you mean"), ("claims_of_plans.balanced", "no function")):
        with pytest.raises(ConfigError, match=text):
            ledger.function(name)


def test_the_rules_of_r18_and_r19_are_refused_before_a_run():
    slope = create_method("basis-rotation", {"lr_slope": 0.03})
    slope.check(context(0, stages=34))
    with pytest.raises(ConfigError):
        slope.check(context(0, stages=35))
    beta = create_method("pipedream", {"beta1_rule": "article"})
    beta.check(context(0, stages=2))
    with pytest.raises(ConfigError):
        beta.check(context(1, stages=2))


# rules


def claim(**changed: object) -> ClaimEntry:
    answer = {"experiment": "balance", "found_by": "claims_of_plans.balance", "setup": "published"}
    data = {"id": "C1", "system": "canzona", "what": "x", "setup": "y", "value": 2.0, "unit": "times"}
    return ClaimEntry(**(data | {"answers": [answer]} | changed))  # pyright: ignore[reportArgumentType]


def ours(value: float, low: float = math.nan, high: float = math.nan, **changed: object) -> Finding:
    found = Finding("C1", "value", value, low, high, "times", n=3, kind="measured")
    return replace(found, **changed)  # pyright: ignore[reportArgumentType]


def answer(value: Finding | None, setup: str = "published", **parts: Finding) -> Answer:
    effect = parts.pop("effect", value and replace(value, part="effect"))
    return Answer("balance", setup, value, parts.get("baseline"), effect)


@pytest.mark.parametrize(
    ("found", "word", "why"),
    [
        (answer(ours(2.1, 1.9, 2.3)), REPRODUCED, "within our interval"),
        (answer(ours(2.15, 2.1, 2.3)), REPRODUCED, "within 10%"),
        (answer(ours(1.9, 1.7, 1.95), "identified"), REPRODUCED, "not stated"),
        (answer(ours(2.1, 1.9, 2.3), "any"), REPRODUCED, "any size"),
        (answer(ours(2.1, 1.9, 2.3), "assumed"), SAME, "may be chance"),
        (answer(ours(2.1, 1.9, 2.3), "smaller"), SAME, "another model"),
        (answer(ours(2.1, 1.9, 2.3, n=2)), SAME, "n = 2, where 3 are needed"),
        (answer(ours(3.0, 2.5, 3.5)), SAME, "outside"),
        (answer(ours(1.2, 1.01, 1.4)), SAME, "outside"),
        (answer(ours(1.2, 0.99, 1.4)), NOT, "includes no effect"),
        (answer(ours(2.0, 0.9, 4.0)), NOT, "includes no effect"),  # a wide interval around the published number
        (answer(ours(0.5, 0.4, 0.6)), NOT, "the other direction"),
        (answer(ours(2.0, n=1)), UNTESTED, "no interval"),
        (answer(ours(2.0, kind="planned", n=0)), REPRODUCED, "digits shown"),
        (answer(ours(2.4, kind="planned", n=0)), REPRODUCED, "digits shown"),  # published without decimals
        (answer(ours(2.6, kind="planned", n=0)), SAME, "not equal"),
        (answer(ours(2.6, kind="projected", n=0)), SAME, "outside of the tolerance"),
        (answer(ours(1.0, kind="planned", n=0)), NOT, "no effect"),
        (answer(ours(math.nan, note="failed")), UNTESTED, "nothing here"),
        (answer(ours(2.1, 1.9, 2.3, unit="s"), effect=ours(2.1, 1.9, 2.3)), SAME, "another quantity"),
        (None, UNTESTED, "nothing here"),
    ],
)
def test_verdicts_follow_the_rules(found, word, why):
    verdict = verdicts.judge(claim(), found, "nothing here")
    assert verdict.word == word
    assert why in verdict.reason


def test_every_published_number_must_agree():
    both = claim(value=1.43, baseline_value=3.24, unit="ratio")
    exact = {"kind": "planned", "n": 0, "unit": "ratio"}
    parts = {"baseline": ours(3.2384, **exact), "effect": ours(2.258, **exact)}
    assert verdicts.judge(both, answer(ours(1.4342, **exact), **parts)).word == REPRODUCED
    assert verdicts.judge(both, answer(ours(1.4352, **exact), **parts)).word == SAME
    parts["baseline"] = ours(3.21, **exact)
    assert verdicts.judge(both, answer(ours(1.4342, **exact), **parts)).word == SAME


def test_an_effect_is_compared_where_the_claim_says_so():
    speedup = claim(value=0.066, baseline_value=0.383, unit="s", compare="effect")
    seconds = {"unit": "s", "kind": "projected", "n": 0}
    parts = {"baseline": ours(38.3, **seconds), "effect": ours(5.9, 5.7, 6.1, **seconds)}
    found = answer(ours(6.6, **seconds), **parts)
    assert verdicts.judge(speedup, found).word == REPRODUCED, "seconds of another machine, the same quotient"
    assert ledger.ratio(speedup, found)[0] == pytest.approx(5.9 / 5.803, rel=1e-3)
    assert verdicts.judge(speedup.model_copy(update={"compare": "value"}), found).word == SAME


@pytest.mark.parametrize(
    ("value", "n", "setup", "word"),
    [
        (0.0, 3, "any", REPRODUCED),
        (5e-4, 3, "any", REPRODUCED),
        (2e-3, 3, "any", NOT),
        (0.0, 2, "any", SAME),
        (0.0, 3, "smaller", SAME),
    ],
)
def test_equality_is_judged_by_its_own_tolerance(value, n, setup, word):
    equal = claim(value=None, unit="identical", equal_to=0.0, tolerance=1e-3)
    assert verdicts.judge(equal, Answer("precision", setup, ours(value, n=n))).word == word


def test_what_cannot_be_tested_is_not_however_well_it_agrees():
    never = claim(not_testable="advice")
    assert verdicts.judge(never, answer(ours(2.0, 1.9, 2.1))) == verdicts.Verdict(UNTESTED, "advice")


# findings


def plans(asc: float = 3.2384, canzona: float = 1.4342) -> pd.DataFrame:
    shared = {"model": "qwen3-32b", "model_name": "Qwen3-32B", "dp": 32, "tp": 8, "status": "done"}
    shared |= {"alpha": 1.0, "cost": "numel"}
    rows = []
    for system, value in (("asc", asc), ("canzona", canzona)):
        ratios = {"flops_ratio_tp_local": value, "flops_ratio": value / 2, "memory_ratio": value - 0.78}
        rows.append({**shared, "sweep": "mesh", "system": system, "system_name": system, **ratios})
    alphas = {0.0: 2.3, 0.5: 2.2, 0.8: 1.5, 1.0: 1.1}
    rows += [{**shared, "sweep": "alpha", "alpha": a, "flops_ratio": v} for a, v in alphas.items()]
    rows += [{**shared, "sweep": "cost", "cost": c, "flops_ratio": 1.16} for c in ("numel", "memory", "flops")]
    return pd.DataFrame(rows)


def verdict_of(found: list[Finding], name: str, setup: str = "published") -> tuple[str, Finding | None]:
    mine = answers(found, name, "x", setup)
    known = next((a for a in mine if a.known), None)
    return verdicts.judge(CLAIMS[name], known, "; ".join(a.note for a in mine)).word, known.main if known else None


def test_plans_answer_balance_alpha_and_cost():
    found = claims_of_plans.balance(plans())
    assert verdict_of(found, "C1", "identified")[0] == REPRODUCED
    assert verdict_of(claims_of_plans.balance(plans(canzona=1.44)), "C1", "identified")[0] == SAME
    assert verdict_of(claims_of_plans.balance(plans(canzona=3.5)), "C1", "identified")[0] == NOT
    word, best = verdict_of(found, "C7a", "assumed")
    assert (word, best and best.value) == (SAME, 1.0)
    worse = plans()
    worse.loc[(worse["sweep"] == "alpha") & (worse["alpha"] == 0.5), "flops_ratio"] = 1.05
    found = claims_of_plans.balance(worse)
    assert [verdict_of(found, name, "assumed")[0] for name in ("C7a", "C7b", "C11")] == [NOT, NOT, SAME]
    worse.loc[worse["cost"] == "flops", "flops_ratio"] = 1.1
    assert verdict_of(claims_of_plans.balance(worse), "C11", "any")[0] == NOT
    assert {f.kind for f in found} == {"planned"}


def curves(rates: dict[tuple[str, int, float], float], seeds: int = 3, **changed: object) -> pd.DataFrame:
    """A tidy table of made-up trainings: the loss of (method, stages, learning rate) falls with its rate."""
    rows = []
    for (system, stages, lr), rate in rates.items():
        for seed in range(seeds):
            shared = {"run": f"{system}-p{stages}-{lr:g}-s{seed}", "status": "done", "error": "", "model": "tiny"}
            shared |= {"layers": None, "stages": stages, "seed": seed, "lr": lr, "steps": 400, "settings": "{}"}
            shared |= {"system": system, "system_name": system, "reference": system, "quantity": "heldout_loss"}
            for update in range(20, 401, 20):
                loss = 6 / (1 + rate * update * (1 + 0.02 * seed * (1 + len(system) % 3)))
                rows.append({**shared, "update": update, "value": loss, **changed})
    return pd.DataFrame(rows)


def delayed() -> dict[str, pd.DataFrame]:
    """Frames in which what was published is so, at another scale."""
    methods = {("adamw", 1, 8e-3): 0.08, ("rotation", 1, 8e-3): 0.1, ("pipedream-lr", 1, 8e-3): 0.08}
    methods |= {("adamw", 8, 4e-3): 0.02, ("pipedream-lr", 8, 4e-3): 0.03, ("nesterov", 8, 4e-3): 0.025}
    ablation = {"bi-2nd": 0.05, "uni-2nd": 0.04, "bi-1st": 0.05, "k10": 0.03}
    stash = {"rotation": 0.05, "rotation-no-stash": 0.049, "adamw": 0.02, "adamw-no-stash": 0.005}
    refreshes = {"uniform": 0.03, "stage-aware": 0.05, "reversed": 0.02}
    rates = {(1, 8e-3): 0.08, (1, 2e-3): 0.04, (8, 8e-3): 0.01, (8, 2e-3): 0.02}
    return {
        "rotation": curves(methods | {("rotation", 8, 4e-3): 0.07}),
        "staleness": curves({k: v for k, v in methods.items() if k[0] == "adamw"}),
        "sweep": curves({("adamw", *place): rate for place, rate in rates.items()}),
        "stage_aware": curves(at_8(refreshes)),
        "no_stash": curves(at_8(stash)),
        "rotation_ablation": curves(at_8(ablation)),
    }


def at_8(rates: dict[str, float]) -> dict[tuple[str, int, float], float]:
    return {(system, 8, 1e-3): rate for system, rate in rates.items()}


EXPECTED = {
    "rotation": {"R1": SAME, "R2": SAME, "R3": SAME, "R5a": SAME},
    "staleness": {"R1": SAME, "R14b": SAME},
    "sweep": {"R14a": SAME},
    "stage_aware": {"R7a": SAME, "R7b": SAME},
    "no_stash": {"R9": SAME},
    "rotation_ablation": {"R4a": SAME, "R4b": NOT, "R4c": UNTESTED, "R20a": UNTESTED},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_trainings_under_delay_answer_their_claims_in_any_order_of_rows(name):
    frame = delayed()[name]
    shuffled = frame.sample(frac=1, random_state=1).reset_index(drop=True)
    for rows in (frame, shuffled):
        found = DELAYED[name](rows)
        assert {c: verdict_of(found, c, "smaller")[0] for c in EXPECTED[name]} == EXPECTED[name]
    assert {f.kind for f in DELAYED[name](frame)} == {"measured"}
    assert all(f.n == 3 and f.runs and "tiny" in f.scale for f in DELAYED[name](frame) if f.known)


def test_slowdowns_are_quotients_of_iterations_paired_by_seed():
    frame = delayed()["rotation"]
    found = {(f.claim, f.part): f for f in claims_of_delay.rotation(frame)}
    assert found["R1", "value"].value == pytest.approx(4, rel=0.05)  # 0.08 / 0.02
    assert found["R3", "effect"].value == pytest.approx(4 / (0.1 / 0.07), rel=0.1)
    assert found["R5a", "value"].value == pytest.approx(100 * (1 - 0.03 / 0.07), rel=0.1), "against PipeDream-LR"
    assert "pipedream-lr" in found["R5a", "value"].note


def test_the_other_way_round_is_not_reproduced():
    found = claims_of_delay.stage_aware(curves(at_8({"uniform": 0.05, "stage-aware": 0.03})))
    assert verdict_of(found, "R7a", "smaller")[0] == NOT
    hurt = {"rotation": 0.05, "rotation-no-stash": 0.01, "adamw": 0.02, "adamw-no-stash": 0.0195}
    found = claims_of_delay.no_stash(curves(at_8(hurt)))
    assert verdict_of(found, "R9", "smaller")[0] == NOT


@pytest.mark.parametrize("name", DELAYED)
@pytest.mark.parametrize("status", ["failed", "diverged", "missing"])
def test_broken_trainings_are_a_reason_and_no_number(name, status):
    frame = delayed()[name].assign(status=status, error="out of luck", value=math.nan)
    found = DELAYED[name](frame)
    assert not [f for f in found if f.known]
    assert {f.claim for f in found} >= set(EXPECTED[name])
    assert any(status in f.note for f in found)
    assert not [f for f in DELAYED[name](frame.iloc[:0]) if f.known]


def test_one_seed_gives_no_verdict():
    found = claims_of_delay.rotation(delayed()["rotation"].query("seed == 0"))
    assert verdict_of(found, "R1", "published")[0] == UNTESTED


def test_a_seed_that_never_reaches_the_target_leaves_no_number():
    frame = delayed()["staleness"]
    frame = frame.loc[~((frame["stages"] == 1) & (frame["seed"] == 2) & (frame["update"] > 20))]
    frame.loc[(frame["stages"] == 1) & (frame["seed"] == 2), "value"] = 5.9
    (first, *_) = claims_of_delay.staleness(frame)
    assert not first.known
    assert "not every seed" in first.note


def test_engine_runs_answer_bytes_losses_and_speedups(tmp_path):
    found = claims_of_engine.step_time(step_time_frame(tmp_path / "a"))
    assert verdict_of(found, "C12", "any")[0] == REPRODUCED
    assert verdict_of(found, "C3", "smaller")[0] == UNTESTED, "no NV-layerwise (ping-pong) in this experiment"
    frame = step_time_frame(tmp_path / "a")
    frame.loc[
        (frame["phase"] == "optimizer_step") & (frame["axis"] == "dp") & (frame["system"] == "canzona"), "value"
    ] = 8.0
    assert verdict_of(claims_of_engine.step_time(frame), "C12", "any")[0] == NOT
    frame = step_time_frame(tmp_path / "a").replace(
        {"system": {"nv-lpt-ns": "nv-ping-pong", "canzona": "x", "sc": "canzona"}}
    )
    word, slower = verdict_of(claims_of_engine.step_time(frame), "C3", "smaller")
    assert word == NOT, "a system that takes twice the time"
    assert slower is not None
    assert slower.n == 8
    found = claims_of_engine.step_time(step_time_frame(tmp_path / "b", finished=False))
    assert not [f for f in found if f.known]
    assert verdict_of(found, "C12", "any")[0] == UNTESTED


def test_losses_are_compared_over_meshes_and_seeds(tmp_path):
    frame = precision_frame(tmp_path)
    word, found = verdict_of(claims_of_engine.precision_losses(frame), "C6", "any")
    assert (word, found and found.value, found and found.n) == (REPRODUCED, 0.0, 4)
    frame.loc[(frame["system"] == "canzona") & (frame["step"] == 7) & (frame["tp"] == 2), "loss"] += 0.01
    word, found = verdict_of(claims_of_engine.precision_losses(frame), "C6", "any")
    assert word == NOT
    assert found is not None
    assert "first at step 7" in found.note
    missing = claims_of_engine.precision_losses(precision_frame(tmp_path / "none", finished=False))
    assert not [f for f in missing if f.known]
    assert "missing" in missing[0].note


def test_losses_of_runs_that_stopped_early_are_no_agreement(tmp_path):
    frame = precision_frame(tmp_path)
    canzona = frame["system"] == "canzona"
    early = frame[~canzona | (frame["step"] <= 2)].copy()
    early.loc[early["system"] == "canzona", "status"] = "failed"
    word, found = verdict_of(claims_of_engine.precision_losses(early), "C6", "any")
    assert word == "not testable here"
    assert found is None or not found.known
    early.loc[early["system"] == "canzona", "status"] = "diverged"
    (finding,) = claims_of_engine.precision_losses(early)
    assert not finding.known
    assert "diverged under canzona, not under sc" in finding.note


def test_times_are_of_a_job_with_both_systems_and_of_the_published_model(tmp_path):
    frame = step_time_frame(tmp_path).replace({"system": {"nv-lpt-ns": "nv-ping-pong"}})
    frame = frame[(frame["dp"] == 2) & (frame["tp"] == 1)].assign(shared_cores=False)
    large = frame.assign(model="qwen3-32b", run="large")
    last = frame.assign(model="qwen3-72b", run="last")  # larger, but not the published one
    both = pd.concat([frame.assign(model="qwen3-1.7b", run="small"), large, last], ignore_index=True)
    for model, expected in (("qwen3-32b", "qwen3-32b"), ("qwen3-14b", "qwen3-72b")):
        found = claims_of_engine.step_time(both.replace({"model": {"qwen3-32b": model}}))
        scales = {f.scale.partition(",")[0] for f in found if f.claim in ("C3", "C4", "C5")}
        assert scales == {expected}
    only_sc = both[~((both["model"] == "qwen3-72b") & (both["system"] == "canzona"))]
    found = claims_of_engine.step_time(only_sc.replace({"model": {"qwen3-32b": "qwen3-14b"}}))
    assert {f.scale.partition(",")[0] for f in found if f.claim == "C3"} == {"qwen3-14b"}


def test_generality_answers_speedups(tmp_path):
    data = fake_runs.step_time_data() | {"optimizers": [{"id": "soap", "name": "SOAP"}], "compare_parameters": True}
    experiment = fake_runs.parse(fake_runs.StepTimeExperiment, data)
    for run in experiment.runs("ci"):
        fake_runs.step_time_run(tmp_path, run)
    found = claims_of_engine.generality(collect(experiment, "ci", tmp_path))
    word, speedup = verdict_of(found, "C10", "smaller")
    assert word == SAME
    assert speedup is not None
    assert speedup.value == pytest.approx(2, rel=0.05)
    assert verdict_of(found, "C9", "smaller")[0] == UNTESTED


def projected(status: str = "done", ours: float = 0.06) -> pd.DataFrame:
    case = {"model": "qwen3-32b", "optimizer": "muon", "dp": 32, "tp": 8, "hardware": "h100x256", "status": status}
    case |= {"model_name": "Qwen3-32B", "optimizer_name": "Muon", "reason": "why", "kind": "projected", "unit": "s"}
    value = math.nan if status != "done" else 1.0
    rows = []
    for system, seconds, ratio in (("nv-ping-pong", 0.4, math.nan), ("canzona", ours, 0.4 / ours)):
        numbers = {"value": seconds, "low": 0.9 * seconds, "high": 1.1 * seconds}
        numbers |= {"ratio": ratio, "ratio_low": 0.9 * ratio, "ratio_high": 1.1 * ratio}
        keys = {**case, "grid": "claims", "varied": "C3", "system": system, "system_name": system}
        rows.append(keys | {name: value * number for name, number in numbers.items()})
    for capacity, seconds, held in ((1.3e8, 0.25, 8e9), (5e8, 0.2, 1.6e10), (4e9, 0.2, 3.2e10)):
        shared = {**case, "grid": "capacity", "varied": f"capacity_bytes={capacity:.0f}"}
        rows += [
            {**shared, "quantity": q, "value": v * value}
            for q, v in (("optimizer", seconds), ("memory/micro_groups", held))
        ]
    return pd.DataFrame(rows)


def test_projections_answer_times_and_capacity():
    found = claims_of_projection.projection(projected())
    assert verdict_of(found, "C3", "published")[0] == SAME
    assert verdict_of(claims_of_projection.projection(projected(ours=0.069)), "C3", "published")[0] == REPRODUCED
    assert verdict_of(claims_of_projection.projection(projected(ours=0.069)), "C3", "assumed")[0] == SAME
    assert verdict_of(claims_of_projection.projection(projected(ours=0.8)), "C3", "published")[0] == NOT
    assert [verdict_of(found, name, "assumed")[0] for name in ("C8a", "C8b")] == [SAME, SAME]
    assert verdict_of(found, "C9")[0] == UNTESTED
    bad = claims_of_projection.projection(projected("does not fit"))
    assert not [f for f in bad if f.known]
    assert any("does not fit" in f.note for f in bad)


def test_what_fits_decides_on_memory():
    done = {"kind": "planned", "status": "done"}
    shared = {**done, "sweep": "claim", "claim": "R11", "quantity": "memory of a card", "case": "a", "unit": "GB"}
    shared |= {"case_name": "A", "method_name": "m", "policy_name": "p", "reason": "r"}
    rows = [
        {**shared, "part": part, **dict.fromkeys(("value", "low", "high"), v)}
        for part, v in (("baseline", 22.1), ("value", 23.4))
    ]
    rows.append({**done, "sweep": "case", "case": "a", "quantity": "card", "value": 25.8e9})
    largest = {**done, "sweep": "largest", "hardware": "rtx3090", "model": "llama-7b", "method": "rotation"}
    rows += [{**largest, "stages": stages, "value": 9.0, "sequence": 512} for stages in (4, 8)]
    frame = pd.DataFrame(rows)
    found = claims_of_pipelines.pipeline_projection(frame)
    assert [verdict_of(found, name)[0] for name in ("R11", "R21a", "R21b")] == [REPRODUCED, SAME, UNTESTED]
    frame.loc[frame["part"] == "value", "value"] = 61.3
    frame.loc[frame["sweep"] == "largest", "value"] = 0.0
    found = claims_of_pipelines.pipeline_projection(frame)
    assert [verdict_of(found, name)[0] for name in ("R11", "R21a")] == [NOT, NOT]
    found = claims_of_pipelines.pipeline_projection(frame.assign(status="does not fit", value=math.nan))
    assert not [f for f in found if f.known]


def curvature(before: float, after: float, seeds: int = 3) -> pd.DataFrame:
    rows = []
    for seed in range(seeds):
        for layer in range(3):
            for group in ("attention", "MLP"):
                shared = {
                    "run": f"h-s{seed}",
                    "status": "done",
                    "error": "",
                    "model": "tiny",
                    "updates": 200,
                    "seed": seed,
                }
                shared |= {"matrix": f"{layer}-{group}", "layer": layer, "role": group, "group": group}
                drift = 1 + 0.1 * seed + 0.01 * layer
                for basis, value in (("before", before), ("after", after * (1 + 0.05 * layer)), ("random", 1.0)):
                    for quantity in ("normalised", "entry_sum"):
                        rows.append({**shared, "basis": basis, "quantity": quantity, "value": drift * value})
                eigenvalue = drift * (3.0 + 0.1 * layer if group == "attention" else 1.0)
                rows.append({**shared, "basis": None, "quantity": "largest_eigenvalue", "value": eigenvalue})
    return pd.DataFrame(rows)


def test_the_hessian_answers_in_seeds_not_matrices():
    found = claims_of_hessian.hessian(curvature(0.5, 0.2))
    word, main_ = verdict_of(found, "R8", "smaller")
    assert (word, main_ and main_.n) == (SAME, 3)
    assert verdict_of(found, "R17a", "smaller")[0] == SAME
    assert verdict_of(claims_of_hessian.hessian(curvature(0.2, 0.5)), "R8", "smaller")[0] == NOT
    broken = curvature(0.5, 0.2).assign(value=math.nan, status="diverged", error="")
    assert not [f for f in claims_of_hessian.hessian(broken) if f.known]


# the ledger


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results") / "laptop"
    for name, frame in {**delayed(), "balance": plans(), "hessian": curvature(0.5, 0.2)}.items():
        (folder / name).mkdir(parents=True)
        frame.to_parquet(folder / name / f"{name}.parquet")
        (folder / name / f"{name}.html").write_text("")
        (folder / name / f"{name}.png").write_text("")
    (folder / "pipelines" / "runs" / "adamw-p8-0.004-s0").mkdir(parents=True)
    return folder


@pytest.fixture(scope="module")
def table(results) -> pd.DataFrame:
    return judged(results)


def judged(results: Path, tier: str = "laptop") -> pd.DataFrame:
    return ledger.frame(ledger.judge(list(CLAIMS.values()), results, tier), results)


def test_an_empty_folder_gives_a_ledger_without_verdicts(tmp_path):
    frame = judged(tmp_path, "ci")
    assert list(frame.columns) == list(ledger.COLUMNS)
    assert list(frame["id"]) == list(CLAIMS)
    assert set(frame["verdict"]) == {UNTESTED}
    reasons = dict(zip(frame["id"], frame["reason"], strict=True))
    assert reasons["C1"] == "balance: not run: make reproduce TIER=ci"
    assert reasons["R8"] == "hessian: not run: make full TIER=ci"
    assert reasons["R10"] == CLAIMS["R10"].not_testable
    assert ledger_document.head(frame).startswith(f"Of {len(CLAIMS)} claims: **0 reproduced**")
    assert "no number of ours yet" in texts(ledger_figure.figure(frame))


def test_the_larger_experiment_comes_first_if_it_has_a_number(results, table, tmp_path):
    frame = table.set_index("id")
    assert frame.loc["R1", "experiment"] == "rotation"
    (tmp_path / "rotation_full").mkdir()
    for name in ("rotation", "staleness"):
        (tmp_path / name).symlink_to(results / name)
    deep = delayed()["rotation"].replace({"stages": {8: 32}})
    deep.to_parquet(tmp_path / "rotation_full" / "rotation_full.parquet")
    frame = judged(tmp_path).set_index("id")
    assert frame.loc["R1", "experiment"] == "rotation_full"
    assert "P = 32" in str(frame.loc["R1", "scale"])
    deep.assign(status="failed", value=math.nan).to_parquet(tmp_path / "rotation_full" / "rotation_full.parquet")
    assert judged(tmp_path).set_index("id").loc["R1", "experiment"] == "rotation"


def test_broken_tables_are_reasons(tmp_path):
    for name, content in (("balance", b"not parquet"), ("staleness", None)):
        (tmp_path / name).mkdir()
        path = tmp_path / name / f"{name}.parquet"
        path.write_bytes(content) if content else delayed()[name].drop(columns="stages").to_parquet(path)
    frame = judged(tmp_path).set_index("id")
    assert "corrupt" in str(frame.loc["C1", "reason"])
    assert "make it again" in str(frame.loc["R14b", "reason"])


def test_verdicts_do_not_depend_on_the_order_of_the_claims(results, table):
    backwards = ledger.frame(ledger.judge(list(reversed(CLAIMS.values())), results, "laptop"), results)
    pd.testing.assert_frame_equal(table, backwards.iloc[::-1].reset_index(drop=True))


def test_the_document_shows_numbers_rules_and_links(results):
    one = ledger.judge(list(CLAIMS.values()), results, "laptop")
    frame = ledger.frame(one, results)
    text = ledger_document.document(one, frame, results, "laptop")
    assert verdicts.rules() in text
    for line in ("Tier *laptop*", "[rotation](../rotation/rotation.html)", "[figure](../balance/balance.png)"):
        assert line in text
    assert "[adamw-p8-0.004-s0](../pipelines/runs/adamw-p8-0.004-s0)" in text
    assert "`adamw-p8-0.004-s1`" in text, "a run whose folder is not there has no link"
    assert text.index("## Canzona") < text.index("## How a verdict is given") < text.index("### C1:")
    assert all(f"### {name}: " in text for name in CLAIMS)
    (row,) = [line for line in text.splitlines() if line.startswith("| C1 ")]
    assert [c.strip() for c in row.split("|")][3:5] == ["3.24 -> 1.43 ratio", "3.24 -> 1.43 ratio, planned"]
    assert "nan" not in text.lower().replace("nanosecond", "")
    shown = ledger_document.head(frame)
    assert shown.count("\n| ") < len(CLAIMS)
    assert "| R10" not in shown


def test_the_figure_shows_every_ratio_and_says_the_kind(table):
    frame = table.copy()
    drawn = ledger_figure.figure(frame)
    written = texts(drawn)
    known = frame.loc[frame["ratio"].notna()]
    assert len(known) > 5
    assert all(f"{row['id']}, {row['kind']}" in written for row in known.to_dict("records"))
    assert f"{len(known)} of {len(CLAIMS)}" in written
    assert overlaps(drawn) == []
    frame.loc[frame["id"] == "R7a", ["ratio", "ratio_low", "ratio_high"]] = [-0.5, -1.0, 0.5]
    lines = ledger_figure.figure(frame).axes[0].get_lines()
    assert [line.get_marker() for line in lines].count("<") == 1, "a number below 0 is an arrow"


def test_the_command_writes_every_form(results, table, tmp_path, capsys):
    out = tmp_path / "claims" / "claims.md"
    given = ["claims", "--ledger", str(LEDGER), "--results", str(results), "--tier", "laptop", "--out", str(out)]
    assert main(given) == 0
    assert capsys.readouterr().out.startswith(f"Of {len(CLAIMS)} claims: **1 reproduced**")
    suffixes = {".md", ".html", ".tex", ".parquet", ".csv", ".pdf", ".png", ".rst"}
    assert {path.suffix for path in out.parent.iterdir()} == suffixes
    again = pd.read_parquet(out.with_suffix(".parquet"))
    assert ledger_document.head(again) == ledger_document.head(table)
    assert main([*given[:2], str(tmp_path / "no.yaml"), *given[3:]]) == 2
    assert "cannot read" in capsys.readouterr().err
