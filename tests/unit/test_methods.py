"""Every method's rule against a few independent lines, and the settings that make no sense."""

from __future__ import annotations

import math

import pytest
import torch

from impl.errors import ConfigError
from impl.rotation.method import StageContext, contexts, create_method, registry
from impl.rotation.methods.periods import periods, rates
from impl.rotation.rules import build

STAGES, UPDATES = 8, 400


def context(stage=0, stages=STAGES, staleness=None):
    return StageContext(stage, stages, stages - 1 - stage if staleness is None else staleness, UPDATES)


def vector(seed, size=7):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_all_methods_are_known():
    expected = {
        "pipedream",
        "adamw-beta1-zero",
        "pipedream-lr",
        "pipemare",
        "nesterov",
        "delay-compensation",
        "weight-prediction",
        "pipedream-2bw",
        "gpipe",
        "1f1b-flush",
        "muon",
        "soap",
        "basis-rotation",
    }
    assert expected <= set(registry())


@pytest.mark.parametrize("name", ["pipedream", "muon", "nesterov"])
def test_unknown_setting_names_the_nearest(name):
    with pytest.raises(ConfigError, match="lr_slop"):
        create_method(name, {"lr_slop": 0.1})


def test_unknown_method_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'pipedream'"):
        create_method("pipedreem")


def test_schedules_and_modes():
    by_name = registry()
    assert by_name["pipedream"].modes[0] == "stash"
    assert by_name["pipedream-2bw"].modes == ("2bw",)
    assert by_name["pipemare"].modes == ("no-stash-recompute",)
    assert (by_name["gpipe"].schedule, by_name["gpipe"].modes) == ("gpipe", ("sync",))
    assert (by_name["1f1b-flush"].schedule, by_name["1f1b-flush"].modes) == ("1f1b-flush", ("sync",))


@pytest.mark.parametrize(("name", "beta1"), [("pipedream", 0.9), ("adamw-beta1-zero", 0.0), ("gpipe", 0.9)])
def test_adamw_everywhere(name, beta1):
    """Two steps of both optimizers against torch's AdamW."""
    found = create_method(name)
    for optimizer in (found.matrix_optimizer(context()), found.elementwise_optimizer(context())):
        parameter = torch.nn.Parameter(torch.zeros(7))
        other = torch.optim.AdamW([parameter], lr=1.0, betas=(beta1, 0.99), eps=1e-8, weight_decay=0.0)
        ours, state = torch.zeros(7), optimizer.init_state((7,), torch.device("cpu"))
        for step in (1, 2):
            parameter.grad = vector(step)
            other.step()
            ours -= optimizer.update(vector(step), state, step)
        torch.testing.assert_close(ours, parameter.detach(), rtol=1e-6, atol=1e-6)


def test_pipedream_lr():
    """``lr / tau^p``, p falling from almost 1 to 0 over K; stages with tau 0 and 1 keep the schedule's rate."""
    whole, quarter = create_method("pipedream-lr"), create_method("pipedream-lr", {"fraction": 0.25})
    assert whole.lr(1e-2, 100, context(0)) == pytest.approx(1e-2 / 7**0.75)
    assert whole.lr(1e-2, 400, context(0)) == pytest.approx(1e-2)
    assert quarter.lr(1e-2, 50, context(3)) == pytest.approx(1e-2 / 4**0.5)
    assert quarter.lr(1e-2, 101, context(3)) == 1e-2
    assert whole.lr(1e-2, 1, context(6)) == 1e-2
    assert whole.lr(1e-2, 1, context(7)) == 1e-2


def test_pipemare_learning_rate():
    """PipeMare's 1-based ``tau = (2 (P - i) + 1) / N``, K a quarter of the run."""
    method, four = create_method("pipemare"), contexts(build("1f1b-async", STAGES, UPDATES, per_update=4))
    for stage in range(STAGES):
        i = stage + 1
        assert method.lr(1e-2, 50, context(stage)) == pytest.approx(1e-2 / (2 * (STAGES - i) + 1) ** 0.5)
        assert method.lr(1e-2, 25, four[stage]) == pytest.approx(1e-2 / ((2 * (STAGES - i) + 1) / 4) ** 0.75)
        assert method.lr(1e-2, 100, context(stage)) == pytest.approx(1e-2)


def test_pipemare_backward_weights():
    """T2 against the recurrence in float64; the last stage, and a run without T2, use the newest weights."""
    method, memory, tau = create_method("pipemare"), {}, 4
    weights, mean, gamma = vector(0), torch.zeros(7, dtype=torch.float64), 0.135 ** (1 / tau)
    assert method.backward_weights(weights, memory, context(3)) is None
    for t in range(1, 6):
        step = vector(t)
        weights = weights + step
        memory["update"] = step
        mean = gamma * mean + (1 - gamma) * step.double()
        for _ in range(2):  # asking twice changes nothing
            used = method.backward_weights(weights, memory, context(3))
            torch.testing.assert_close(used.double(), weights.double() - tau * mean, rtol=1e-5, atol=1e-5)
    assert method.backward_weights(weights, {"update": vector(1)}, context(7)) is None
    assert create_method("pipemare", {"correct": False}).backward_weights(weights, {}, context(0)) is None


def test_delay_compensation_constant():
    method = create_method("delay-compensation", {"variant": "constant", "strength": 0.04})
    gradient, newest, stale = vector(0), vector(1), vector(2)
    rows = zip(gradient.tolist(), newest.tolist(), stale.tolist(), strict=True)
    expected = [g + 0.04 * g * g * (w - s) for g, w, s in rows]
    method.correct(gradient, newest, stale, {})
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6)


def test_delay_compensation_adaptive():
    method, memory, mean = create_method("delay-compensation"), {}, [0.0] * 7
    for t in range(3):
        gradient, newest, stale = vector(t), vector(10 + t), vector(20 + t)
        g, w, s = gradient.tolist(), newest.tolist(), stale.tolist()
        mean = [0.95 * m + 0.05 * x * x for m, x in zip(mean, g, strict=True)]
        expected = [x + 2 / math.sqrt(m + 1e-7) * x * x * (a - b) for x, m, a, b in zip(g, mean, w, s, strict=True)]
        method.correct(gradient, newest, stale, memory)
        assert gradient.tolist() == pytest.approx(expected, rel=1e-5)


def test_delay_compensation_without_delay_changes_nothing():
    gradient, same = vector(0), vector(1)
    create_method("delay-compensation").correct(gradient, same, same.clone(), {})
    assert torch.equal(gradient, vector(0))


def test_weight_prediction():
    """Exact if all steps are equal: the prediction is the version the gradient will be applied to."""
    method, step = create_method("weight-prediction"), vector(0)
    version = [vector(1) + t * step for t in range(12)]
    found = method.predict(version[3], {"update": version[3] - version[2]}, context(2), 1e-3)
    torch.testing.assert_close(found, version[3 + 5], rtol=1e-5, atol=1e-5)
    assert method.predict(version[3], {}, context(2), 1e-3) is None
    assert method.predict(version[3], {"update": step}, context(7), 1e-3) is None


def test_muon_settings_reach_the_optimizer():
    method = create_method("muon", {"momentum": 0.5, "lr_slope": 0.01})
    assert method.matrix_optimizer(context()).hyper.momentum == 0.5
    assert method.elementwise_optimizer(context()).name == "adamw"


@pytest.mark.parametrize("name", ["pipedream", "muon", "nesterov", "pipedream-lr"])
def test_linear_rule(name):
    method = create_method(name, {"lr_slope": 0.03})
    method.check(context(0, stages=34))
    with pytest.raises(ConfigError, match=r"slope below 0\.0294 or fewer stages"):
        method.check(context(0, stages=35))
    plain = create_method(name)
    plain.check(context(0, stages=64))
    assert method.lr(1.0, 1, context(2)) == pytest.approx(plain.lr(1.0, 1, context(2)) * (1 - 0.03 * 5))


def test_beta1_rule():
    method = create_method("pipedream", {"beta1_rule": "article"})
    with pytest.raises(ConfigError, match="0/0"):
        method.check(context(7))
    method.check(context(0))
    assert method.matrix_optimizer(context(0)).hyper.betas[0] == pytest.approx(0.9 + 0.1 * math.exp(-7 / 20))


def profile(stages):
    return tuple(stages - 1 - k for k in range(stages))


@pytest.mark.parametrize("stages", [1, 2, 8, 32])
@pytest.mark.parametrize("period", [1, 3, 10])
def test_stage_aware_periods_keep_the_budget(stages, period):
    """As many refreshes altogether as with one period, never fewer where gradients are staler, also turned round."""
    found = periods(profile(stages), period, 100)
    assert sum(1 / f for f in found) == pytest.approx(stages / period, rel=0.02)
    assert list(found) == sorted(found)
    assert periods(profile(stages), period, 100, reverse=True) == found[::-1]
    exact = rates(profile(stages), period, 100)
    assert sum(exact) == pytest.approx(stages / period)
    free = [rate / (tau + 1) for rate, tau in zip(exact, profile(stages), strict=True) if 0.01 < rate < 1]
    assert all(c == pytest.approx(free[0]) for c in free), "in proportion to staleness + 1 wherever no limit applies"


def test_stage_aware_periods_reach_the_optimizers():
    method = create_method("basis-rotation", {"allocation": "stage-aware", "period": 10, "beta1": 0.5})
    places = [StageContext(k, 8, 7 - k, UPDATES, profile(8)) for k in range(8)]
    optimizers = [method.matrix_optimizer(place) for place in places]
    assert tuple(o.hyper.period for o in optimizers) == periods(profile(8), 10, 100)
    assert optimizers[0].hyper.betas == (0.5, 0.99)
    assert method.elementwise_optimizer(places[0]).hyper.betas == (0.9, 0.99)
    with pytest.raises(ConfigError, match="max_period"):
        create_method("basis-rotation", {"allocation": "reversed", "period": 200}).check(places[0])


def test_every_setting_of_rotation_reaches_the_optimizer():
    """Each away from its default, so that one that is not passed on is found."""
    changed = {
        "source": "1st",
        "geometry": "unilateral",
        "period": 3,
        "stagger": True,
        "nesterov": True,
        "gain": 1.5,
        "shampoo_beta": 0.9,
        "eps": 1e-6,
        "basis_dtype": "float16",
        "max_side": 64,
        "beyond": "blocks",
    }
    optimizer = create_method("basis-rotation", changed).matrix_optimizer(context())
    assert {key: getattr(optimizer.hyper, key) for key in changed} == changed


def test_nesterov_and_soap_settings_reach_the_optimizers():
    nesterov = create_method("nesterov")
    for optimizer in (nesterov.matrix_optimizer(context()), nesterov.elementwise_optimizer(context())):
        assert (optimizer.name, optimizer.hyper.betas) == ("nadam", (0.99, 0.99))
    soap = create_method("soap", {"period": 1}).matrix_optimizer(context())
    assert (soap.name, soap.hyper.betas, soap.hyper.period) == ("soap", (0.95, 0.95), 1)


def test_contexts_come_from_the_schedule():
    found = contexts(build("1f1b-async", 4, 12))
    assert [c.staleness for c in found] == [3, 2, 1, 0]
    assert all(c.profile == (3, 2, 1, 0) and c.updates == 12 for c in found)
