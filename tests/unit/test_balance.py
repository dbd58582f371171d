"""The balance report against numbers worked out by hand, and its warnings."""

import json

import pytest

from impl.canzona.balance import WARN_ABOVE, ratio, report
from impl.canzona.strategies import PlanOptions, make_plan
from impl.models import catalogue
from impl.models.parameters import ParamSpec
from impl.optimizers.base import create
from impl.optimizers.routing import route


class Square:
    """FLOPs = elements of the whole, published = 10 a element of the shard, state = 12 bytes an element."""

    name, atomic = "square", True

    def flops(self, shape):
        return float(shape[0] * shape[1])

    def published_flops(self, shape):
        return 10.0 * shape[0] * shape[1]

    def state_bytes(self, shape):
        return 12 * shape[0] * shape[1]


class Plain:
    name, atomic = "plain", False

    def flops(self, shape):
        return 0.0

    published_flops = flops

    def state_bytes(self, shape):
        return 8 * shape[0]


SPECS = (
    ParamSpec("small", (64, 2), tp_dim=0),
    ParamSpec("large", (64, 6), tp_dim=0),
    ParamSpec("norm", (1000,)),
)
COSTS = (Square(), Square(), Plain())


def balance(strategy, dp=2, tp=2, **options):
    plan = make_plan(strategy, SPECS, COSTS, dp, tp, PlanOptions(bucket_elements=10_000, **options))
    return report(plan, COSTS, seconds=0.5)


def test_asc_by_hand():
    got = balance("asc")
    # buffer: large 0..192, small 192..256; equal cut at 128: rank 0 owns large, rank 1 small
    assert got["loads"] == {"flops": [384.0, 128.0], "memory_bytes": [16 * 384, 16 * 128], "elements": [192, 64]}
    assert got["flops_ratio"] == got["flops_ratio_tp_local"] == got["memory_ratio"] == 1.5
    assert got["comm_ratio"] == 1.5
    assert got["padding"] == 0
    assert got["lower_bound"] == {"dp": 1.5, "gpu": 3.0}
    assert got["per_gpu_flops_ratio"] == 3.0  # one host does all of large: 384 over 512 / 4
    # norm: 1000 elements in a bucket of 1024, so ranks hold 512 and 488 of 12 bytes each
    memory = [16 * 384 + 12 * 512, 16 * 128 + 12 * 488]
    assert got["all_parameters"]["memory_ratio"] == pytest.approx(max(memory) * 2 / sum(memory))
    elements = [192 + 512, 64 + 488]
    assert got["all_parameters"]["elements_ratio"] == pytest.approx(max(elements) * 2 / sum(elements))
    assert (got["kind"], got["plan_seconds"], got["matrices"]) == ("planned", 0.5, 2)
    json.dumps(got)


def test_sc_repeats_everything_on_every_gpu():
    got = balance("sc", dp=2, tp=2)
    assert got["per_gpu_flops_ratio"] == 4.0
    assert got["flops_ratio"] == got["memory_ratio"] == 1.0
    assert got["comm_ratio"] is None
    assert got["loads"]["flops"] == [512.0, 512.0]


def test_layerwise_repeats_over_tp_only():
    got = balance("nv-layerwise", dp=1, tp=2, nv_version="ping-pong")
    assert got["per_gpu_flops_ratio"] == 2.0
    got = balance("nv-layerwise", dp=2, tp=2, nv_version="ping-pong")  # by size: small, large, norm -> ranks 0, 1, 1
    assert got["loads"]["flops"] == [128.0, 384.0]
    assert got["comm_ratio"] == 1.5
    assert got["all_parameters"]["elements_ratio"] == pytest.approx((192 + 1000) * 2 / 1256)


def test_barriers_between_micro_groups_add_up():
    together = balance("canzona", dp=1, tp=2)
    apart = balance("canzona", dp=1, tp=2, capacity_bytes=4 * 192)
    assert (together["micro_groups"], apart["micro_groups"]) == (1, 1)
    assert together["per_gpu_flops_ratio"] == 384 / 256
    split = balance("canzona", dp=1, tp=2, capacity_bytes=4 * 192 - 1)  # large is over capacity: a group of its own
    assert split["micro_groups"] == 2
    assert split["over_capacity"] == ["large"]
    assert split["per_gpu_flops_ratio"] == (384 + 128) / 256


def test_shards_of_padded_plans_count_their_padding():
    got = balance("nv-layerwise", dp=2, tp=2, nv_version="lpt-ns")
    assert got["padding"] == 2 * 192 / 256 - 1
    assert got["comm_ratio"] == 1.0


def test_warnings_above_the_limit_only():
    assert not [w for w in balance("sc")["warnings"] if "mean" in w]
    uneven = balance("nv-layerwise", dp=2, tp=2, nv_version="ping-pong")
    assert uneven["all_parameters"]["memory_ratio"] > WARN_ABOVE
    assert [w for w in uneven["warnings"] if w.startswith("memory of all parameters")]
    assert "groups of their own: large" in " ".join(balance("asc", capacity_bytes=700)["warnings"])
    assert "2 of 4 DP ranks own no matrix" in balance("asc", dp=4)["warnings"]


def test_embedding_and_head_on_one_rank_are_warned_about():
    """Owners by count leave the last ranks with embedding and head (NVIDIA/Megatron-LM#2162)."""
    parameters = catalogue.load("qwen3-8b", layers=4).parameters(1)
    costs = [create(r.optimizer) for r in route(parameters, "muon")]
    plan = make_plan("nv-layerwise", parameters, costs, 4, 1, PlanOptions(nv_version="ping-pong"))
    got = report(plan, costs)
    assert got["memory_ratio"] < WARN_ABOVE < got["all_parameters"]["memory_ratio"]
    assert any("memory of all parameters" in w for w in got["warnings"])


def test_ratio():
    assert ratio([1, 2, 3]) == 1.5
    assert ratio([0, 0]) is None
