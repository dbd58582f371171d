import json
import math

import pytest

from impl.errors import ConfigError
from impl.harness.schedule import learning_rate
from impl.harness.spec import RunSpec, ScheduleSpec, assign, parse


def shuffled(data: dict) -> dict:
    return {k: shuffled(v) if isinstance(v, dict) else v for k, v in reversed(list(data.items()))}


def test_digest_does_not_depend_on_key_order_or_on_spelled_out_defaults():
    spec = parse(RunSpec, {"model": "qwen3-tiny", "plan": {"alpha": 0.5}})
    assert parse(RunSpec, shuffled(spec.resolved())).digest == spec.digest
    assert parse(RunSpec, json.loads(json.dumps(spec.resolved()))) == spec


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"dp": 2},
        {"plan": {"alpha": 0.0}},
        {"data": {"source": "x"}},
        {"optimizer_settings": {"momentum": 0.9}},
        {"runtime": {"deterministic": False}},
    ],
)
def test_digest_changes_with_what_decides_the_result(change):
    base = {"model": "qwen3-tiny"}
    assert parse(RunSpec, base | change).digest != parse(RunSpec, base).digest


def test_digest_ignores_timings():
    base = parse(RunSpec, {"model": "qwen3-tiny"})
    for key in ("heartbeat_s", "collective_timeout_s"):
        assert parse(RunSpec, {"model": "qwen3-tiny", "runtime": {key: 77.0}}).digest == base.digest


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("1e-3", 1e-3), ("4e8", 4e8), ("false", False), ("null", None), ("[a, b]", ["a", "b"]), ("x=y", "x=y")],
)
def test_assigned_values_are_yaml(text, value):
    data: dict = {"a": {"b": 0}}
    assign(data, f"a.c.d={text}")
    assert data == {"a": {"b": 0, "c": {"d": value}}}
    assert type(data["a"]["c"]["d"]) is type(value)


def test_unknown_keys_are_refused_at_every_depth():
    with pytest.raises(ConfigError, match="unknown setting 'modle': did you mean 'model'"):
        parse(RunSpec, {"modle": "x"})
    with pytest.raises(ConfigError, match="unknown setting of schedule 'warmup': did you mean 'warmup_steps'"):
        parse(RunSpec, {"model": "x", "schedule": {"warmup": 3}})


def test_learning_rate_hits_its_marks_exactly():
    schedule = ScheduleSpec(warmup_steps=20, final_fraction=0.1)
    rates = [learning_rate(schedule, 8e-3, step, 400) for step in range(1, 401)]
    assert rates[0] == 8e-3 / 20
    assert rates[9] == pytest.approx(4e-3, rel=1e-15)
    assert rates[19] == 8e-3
    assert rates[209] == pytest.approx(8e-3 * 0.55, rel=1e-12)  # half of the cosine
    assert rates[399] == pytest.approx(8e-4, rel=1e-15)
    assert rates[:20] == sorted(rates[:20])
    assert rates[19:] == sorted(rates[19:], reverse=True)


@pytest.mark.parametrize("warmup", [0, 1])
def test_learning_rate_without_warmup_starts_at_the_peak(warmup):
    schedule = ScheduleSpec(warmup_steps=warmup, final_fraction=0.0)
    assert learning_rate(schedule, 2.0, 1, 5) == 2.0
    assert learning_rate(schedule, 2.0, 3, 5) == pytest.approx(1.0)
    assert learning_rate(schedule, 2.0, 5, 5) == pytest.approx(0.0, abs=1e-15)
    assert learning_rate(schedule, 2.0, 1, 1) == 2.0


def test_learning_rate_of_a_run_shorter_than_its_warmup_only_rises():
    schedule = ScheduleSpec(warmup_steps=20)
    rates = [learning_rate(schedule, 1.0, step, 10) for step in range(1, 11)]
    assert rates == [step / 20 for step in range(1, 11)]
    assert all(math.isfinite(r) for r in rates)
