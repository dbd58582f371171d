"""What every optimizer of the registry must do, whoever wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

from impl.errors import ConfigError
from impl.optimizers.base import create, registry

CPU = torch.device("cpu")
YAML = Path(__file__).parents[2] / "experiments" / "optimizers"
MATRICES = [(6, 10), (10, 6), (8, 8), (1, 5), (5, 1)]


def fresh(name, shape, seed=0):
    optimizer = create(name)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return optimizer, grad, optimizer.init_state(shape, CPU)


def shapes(name):
    return MATRICES if create(name).atomic else [*MATRICES, (7,), (2, 3, 4)]


CASES = [(name, shape) for name in registry() for shape in shapes(name)]


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_update(name, shape):
    optimizer, grad, state = fresh(name, shape)
    before = grad.clone()
    for step in (1, 2, 3):
        update = optimizer.update(grad, state, step)
        assert update.shape == grad.shape
        assert update.dtype == torch.float32
        assert update.is_contiguous()
        assert update.isfinite().all()
        held = {t.data_ptr() for t in (grad, *state.values())}
        assert update.data_ptr() not in held, "the update may be changed by the caller"
    assert torch.equal(grad, before)
    assert update.norm() > 0


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_costs_and_state(name, shape):
    optimizer, _, state = fresh(name, shape)
    assert optimizer.flops(shape) > 0
    assert optimizer.published_flops(shape) > 0
    assert all(t.dtype == torch.float32 for t in state.values())
    assert optimizer.state_bytes(shape) == sum(t.numel() * t.element_size() for t in state.values())


@pytest.mark.parametrize("name", registry())
def test_state_bytes_stay_true_after_steps(name):
    optimizer, grad, state = fresh(name, (6, 10))
    for step in (1, 2):
        optimizer.update(grad, state, step)
    assert optimizer.state_bytes((6, 10)) == sum(t.numel() * t.element_size() for t in state.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", registry())
def test_many_equal_one_by_one(name, dtype):
    """Bit for bit, mixed and odd shapes included, so that neighbours in a group never matter."""
    optimizer = create(name)
    sizes = [(6, 10), (10, 6), (6, 10), (4, 4), (7, 13), (32, 96), (7, 13), (33, 129), (32, 96), (7, 13), (33, 129)]
    sizes += [(32, 96), (16, 16), (48, 16), (8, 32), (48, 16), (16, 16), (8, 32)]
    grads = [torch.randn(s, generator=torch.Generator().manual_seed(i), dtype=dtype) for i, s in enumerate(sizes)]
    many, alone = ([optimizer.init_state(s, CPU, dtype) for s in sizes] for _ in range(2))
    for step in (1, 2):
        together = optimizer.update_many(grads, many, step)
        for i, update in enumerate(together):
            assert torch.equal(update, optimizer.update(grads[i], alone[i], step))
            assert all(torch.equal(many[i][k], alone[i][k]) for k in alone[i])
    assert optimizer.update_many([], [], 3) == []


def full_precision(name):
    """The settings in which an optimizer computes in no less than its state's precision: every choice of float64."""
    fields = registry()[name].Hyper.model_fields
    return {key: "float64" for key, field in fields.items() if "float64" in get_args(field.annotation)}


@pytest.mark.parametrize("name", registry())
def test_float64(name):
    """State and updates are float64, and no step on the way rounds to fp32."""
    for settings in ({}, full_precision(name)):
        optimizer = create(name, settings)
        first, second = (
            torch.randn(8, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) for seed in (1, 2)
        )

        def last(optimizer, *grads):
            state = optimizer.init_state((8, 8), CPU, torch.float64)
            assert all(t.dtype == torch.float64 for t in state.values())
            updates = [optimizer.update(grad, state, step) for step, grad in enumerate(grads, 1)]
            assert all(update.dtype == torch.float64 for update in updates)
            assert all(t.dtype == torch.float64 for t in state.values())
            return updates[-1]

        update = last(optimizer, first, second)
        assert update.isfinite().all()
    change = last(optimizer, first, second * (1 + 1e-11 * first)) - update
    assert 1e-15 < change.norm() / update.norm() < 1e-8


@pytest.mark.parametrize("name", registry())
def test_float32_is_near_float64(name):
    optimizer = create(name, full_precision(name))
    grads = [torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    found = []
    for dtype in (torch.float32, torch.float64):
        state = optimizer.init_state((8, 8), CPU, dtype)
        found.append([optimizer.update(grad.to(dtype), state, step) for step, grad in enumerate(grads, 1)][-1])
    assert (found[0] - found[1]).norm() < 1e-2 * found[1].norm()


@pytest.mark.parametrize("name", registry())
def test_counters_are_scalars_of_the_state(name):
    optimizer, grad, state = fresh(name, (6, 10))
    for step in (0, 1, 2):
        if step:
            optimizer.update(grad, state, step)
        assert {c: float(state[c]) for c in optimizer.counters} == dict.fromkeys(optimizer.counters, 0.0)
        assert all(state[c].shape == () for c in optimizer.counters)


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_health(name, shape):
    """It measures what it says it measures, changes nothing, finds random gradients healthy and NaN not."""
    optimizer, grad, state = fresh(name, shape)
    for step in (1, 2, 3):
        update = optimizer.update(grad + torch.roll(grad, step), state, step)
    before = [t.clone() for t in (update, *state.values())]
    found = optimizer.health(state, update)
    assert all(torch.equal(a, b) for a, b in zip(before, (update, *state.values()), strict=True))
    assert found.keys() == optimizer.health_metrics.keys()
    for metric, limit in optimizer.health_metrics.items():
        assert 0 <= found[metric] <= limit
    sick = optimizer.health({key: t * float("nan") for key, t in state.items()}, update * float("nan"))
    assert all(sick[metric] > limit for metric, limit in optimizer.health_metrics.items())


@pytest.mark.parametrize("name", registry())
def test_cost_formula_is_one_line_for_people(name):
    formula = registry()[name].cost_formula
    assert formula
    assert "\n" not in formula


@pytest.mark.parametrize("name", registry())
def test_repeatable(name):
    runs = []
    for _ in range(2):
        optimizer, grad, state = fresh(name, (12, 20))
        runs.append([optimizer.update(grad, state, step) for step in (1, 2)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", registry())
def test_scale_invariance_is_declared_truly(name):
    """Over two steps with different gradients, because a first step alone hides a lot (AdamW's is a sign).

    Clipping is not in vain where an optimizer ignores a factor of all gradients, as Shampoo does, if one that is left
    unclipped stays in its averages.
    """
    optimizer = create(name)
    grads = [torch.randn((12, 20), generator=torch.Generator().manual_seed(i)) for i in (1, 2)]

    def last(factors):
        state = optimizer.init_state((12, 20), CPU)
        return [optimizer.update(g * f, state, i) for i, (g, f) in enumerate(zip(grads, factors, strict=True), 1)][-1]

    expected = last((1.0, 1.0))

    def change(*factors):
        return max(float((last(pair) - expected).norm() / expected.norm()) for pair in factors)

    if optimizer.scale_invariant:
        assert change((1e-10, 1e-10), (1e10, 1e10)) < 1e-2
    else:
        assert change((1.0, 1e10), (1e10, 1.0)) > 1e-2, "gradient clipping is applied in vain"


@pytest.mark.parametrize("name", registry())
def test_unknown_settings_list_the_valid_ones(name):
    valid = sorted(registry()[name].Hyper.model_fields)
    with pytest.raises(ConfigError, match=f"known are {', '.join(valid)}"):
        create(name, {"no_such_setting": 1})


def test_an_unknown_optimizer_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'muon'"):
        create("mun")


@pytest.mark.parametrize("name", registry())
def test_its_yaml_holds_its_settings(name):
    data = yaml.safe_load((YAML / f"{name}.yaml").read_text())
    assert data["name"] == name
    assert data["display_name"]
    optimizer = create(name, data["settings"])
    assert set(data["settings"]) == set(optimizer.Hyper.model_fields)
