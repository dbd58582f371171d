"""The planner against numbers that an independent prototype found on exact shapes, and against the published ones."""

import csv
from collections import Counter
from pathlib import Path

import pytest

from impl.canzona.balance import report
from impl.canzona.strategies import PlanOptions, make_plan
from impl.models import catalogue
from impl.optimizers.base import create
from impl.optimizers.routing import route

with (Path(__file__).parent / "data" / "planner_oracle.csv").open() as file:
    ORACLE = list(csv.DictReader(file))


def balance(model, strategy, tp, dp, optimizer="muon", **options):
    parameters = catalogue.load(model).parameters(tp)
    costs = [create(r.optimizer) for r in route(parameters, optimizer)]
    return report(make_plan(strategy, parameters, costs, dp, tp, PlanOptions(**options)), costs)


@pytest.mark.parametrize("row", ORACLE, ids=lambda r: f"{r['optimizer']}-{r['model']}-tp{r['tp']}-dp{r['dp']}")
def test_oracle_rows(row):
    size = None if row["bucket_elements"].startswith("max") else int(float(row["bucket_elements"]))
    for column, strategy in (("start_index", "asc"), ("alpha1", "canzona")):
        got = balance(
            row["model"].lower(),
            strategy,
            int(row["tp"]),
            int(row["dp"]),
            row["optimizer"],
            bucket_elements=size,
            fallback=False,
        )
        assert got["flops_ratio"] == pytest.approx(float(row[f"{column}_flops"]), abs=5.001e-4)
        assert got["memory_ratio"] == pytest.approx(float(row[f"{column}_memory"]), abs=5.001e-4)


def test_oracle_has_the_expected_rows():
    counts = Counter(row["optimizer"] for row in ORACLE)
    assert counts == {"muon": 32, "soap": 3, "shampoo": 3}


POINT = {"model": "qwen3-32b", "tp": 8, "dp": 32, "bucket_elements": 400_000_000}


@pytest.mark.parametrize(
    ("strategy", "flops", "memory"), [("asc", 3.2384, 2.4624), ("canzona", 1.4342, 1.1129)], ids=["asc", "canzona"]
)
def test_published_balance(strategy, flops, memory):
    got = balance(strategy=strategy, **POINT)
    assert round(got["flops_ratio_tp_local"], 4) == flops
    assert round(got["memory_ratio"], 4) == memory
    assert not got["fallback_used"]


def test_other_bucket_sizes_do_not_give_the_published_balance():
    for size in (390_000_000, 415_000_000):
        got = balance(strategy="canzona", **{**POINT, "bucket_elements": size})
        assert abs(got["memory_ratio"] - 1.1129) > 0.01


ALPHAS = {0.0: (2.46, 3.24), 0.2: (2.42, 3.23), 0.4: (2.15, 2.87), 0.5: (2.42, 3.23), 0.6: (2.15, 2.87)}
ALPHAS |= {0.8: (1.61, 2.15), 0.9: (1.34, 1.79), 1.0: (1.11, 1.43)}


@pytest.mark.parametrize("alpha", ALPHAS)
def test_alpha_sweep(alpha):
    got = balance(strategy="canzona", alpha=alpha, fallback=False, **POINT)
    assert (round(got["memory_ratio"], 2), round(got["flops_ratio_tp_local"], 2)) == ALPHAS[alpha]


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        ("asc", {}, 4.27),
        ("canzona", {"tp_mode": "no"}, 3.11),
        ("canzona", {"tp_mode": "single"}, 2.52),
        ("canzona", {"tp_mode": "global"}, 2.04),
        ("nv-layerwise", {"nv_version": "ping-pong"}, 8.0),
        ("sc", {}, 256.0),
    ],
    ids=lambda v: str(v),
)
def test_busiest_gpu(strategy, options, expected):
    got = balance(strategy=strategy, **options, **POINT)
    assert round(got["per_gpu_flops_ratio"], 2) == expected
    assert round(got["lower_bound"]["gpu"], 3) == 2.039
    assert got["lower_bound"]["dp"] == 1.0
    assert got["per_gpu_flops_ratio"] >= got["lower_bound"]["gpu"] - 1e-12


@pytest.mark.parametrize(
    ("model", "tp", "dp", "elements", "flops"),
    [("qwen3-32b", 8, 32, 1.71, 1.00), ("qwen3-14b", 8, 32, 2.57, 1.39), ("qwen3-8b", 8, 32, 3.35, 1.51)],
)
def test_ping_pong_balance_over_all_parameters(model, tp, dp, elements, flops):
    got = balance(model, "nv-layerwise", tp, dp, nv_version="ping-pong")
    # the reference numbers leave out the vocabulary's padding to a multiple of 128 x TP: 0.4 % of the embedding
    assert got["all_parameters"]["elements_ratio"] == pytest.approx(elements, abs=0.01)
    assert round(got["flops_ratio"], 2) == flops


def test_packed_layout_of_megatron_0_19():
    got = balance(strategy="nv-layerwise", nv_version="lpt-numel", **POINT)
    assert (round(got["flops_ratio"], 3), round(got["memory_ratio"], 3)) == (1.080, 1.129)
    assert round(got["padding"], 2) == 0.13


@pytest.mark.parametrize(
    ("mode", "mebibytes", "groups", "expected"),
    [
        ("no", 800, 32, 2.039),
        ("single", 800, 32, 1.000),
        ("global", 128, 15, 1.000),
        ("global", 1024, None, 1.000),
        ("slot", 128, 14, 1.517),
        ("slot", 256, None, 1.250),
        ("slot", 512, None, 1.107),
        ("slot", 1024, None, 1.033),
    ],
)
def test_micro_groups_of_all_matrices_on_one_tp_group(mode, mebibytes, groups, expected):
    got = balance("qwen3-32b", "canzona", 8, 1, tp_mode=mode, capacity_bytes=mebibytes * 2**20)
    assert groups in (None, got["micro_groups"])
    assert round(got["per_gpu_flops_ratio"], 3) == expected


def test_numel_is_a_faithful_cost_of_dense_qwen3():
    by_numel, by_flops = (balance(strategy="canzona", cost=cost, **POINT) for cost in ("numel", "flops"))
    assert by_numel["flops_ratio"] == by_flops["flops_ratio"]
    assert by_numel["per_gpu_flops_ratio"] == pytest.approx(by_flops["per_gpu_flops_ratio"], abs=0.04)


def test_elementwise_optimizer_has_no_matrix_ratios():
    got = balance(strategy="canzona", optimizer="adamw", **POINT)
    assert got["matrices"] == 0
    for field in ("flops_ratio", "flops_ratio_tp_local", "memory_ratio", "per_gpu_flops_ratio", "lower_bound"):
        assert got[field] is None
    assert got["all_parameters"]["memory_ratio"] == pytest.approx(1, abs=1e-3)
