"""First-match routing, the proof that it is complete, and the report."""

from __future__ import annotations

import pytest

from impl.errors import ConfigError
from impl.models.parameters import ParamSpec
from impl.optimizers.routing import Route, check, report, route

LAYER = "decoder.layers.0."
PARAMETERS = (
    ParamSpec("embedding.word_embeddings.weight", (256, 32), 0),
    ParamSpec(LAYER + "self_attention.linear_proj.weight", (32, 32), 1),
    ParamSpec(LAYER + "self_attention.linear_qkv.weight", (64, 32), 0),
    ParamSpec(LAYER + "self_attention.q_layernorm.weight", (8,), partial_over_tp=True),
    ParamSpec(LAYER + "mlp.router.weight", (4, 32)),
    ParamSpec(LAYER + "mlp.linear_fc1.weight", (192, 32), 0, (96, 96)),
    ParamSpec("decoder.final_layernorm.weight", (32,)),
    ParamSpec("output_layer.weight", (256, 32), 0),
)


def by_name(routes):
    return {r.name: (r.optimizer, r.reason) for r in routes}


def test_first_match():
    routes = route(PARAMETERS, "muon")
    assert [r.name for r in routes] == [p.name for p in PARAMETERS]
    assert by_name(routes) == {
        "embedding.word_embeddings.weight": ("adamw", "word embedding"),
        LAYER + "self_attention.linear_proj.weight": ("muon", "matrix"),
        LAYER + "self_attention.linear_qkv.weight": ("muon", "matrix"),
        LAYER + "self_attention.q_layernorm.weight": ("adamw", "1-D"),
        LAYER + "mlp.router.weight": ("adamw", "expert router"),
        LAYER + "mlp.linear_fc1.weight": ("muon", "matrix"),
        "decoder.final_layernorm.weight": ("adamw", "1-D"),
        "output_layer.weight": ("adamw", "output layer"),
    }


def test_frozen_comes_first():
    routes = by_name(route(PARAMETERS, "muon", ["*.linear_qkv.weight", "embedding.*"]))
    assert routes["embedding.word_embeddings.weight"] == (None, "frozen by 'embedding.*'")
    assert routes[LAYER + "self_attention.linear_qkv.weight"][0] is None
    assert sum(optimizer is None for optimizer, _ in routes.values()) == 2


def test_adamw_for_everything():
    routes = route(PARAMETERS, "adamw", ["output_layer*"])
    assert {r.optimizer for r in routes} == {"adamw", None}


def test_a_glob_that_matches_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"'\*linear_fc3\*' matches no parameter.*linear_fc1"):
        route(PARAMETERS, "muon", ["*linear_fc3*"])


def test_nothing_left_to_train_is_refused():
    with pytest.raises(ConfigError, match="no parameter to train"):
        route(PARAMETERS, "muon", ["*"])


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'muon'"):
        route(PARAMETERS, "moun")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r[1:], "has 0 routes"),
        (lambda r: (*r, r[2]), "has 2 routes"),
        (lambda r: (*r, Route("ghost", "muon", "matrix")), "ghost has a route but is no parameter"),
    ],
)
def test_incomplete_routes_are_noticed(change, message):
    routes = route(PARAMETERS, "muon")
    check(PARAMETERS, routes)
    with pytest.raises(ValueError, match=message):
        check(PARAMETERS, change(routes))


def test_two_parameters_of_one_name_are_noticed():
    with pytest.raises(ValueError, match="two parameters are called"):
        route((*PARAMETERS, PARAMETERS[0]), "muon")


def test_report():
    lines = report(PARAMETERS, route(PARAMETERS, "muon", ["output_layer*"])).splitlines()
    assert lines[:3] == [
        "adamw   4 parameters  8,360 elements",
        "muon    3 parameters  9,216 elements",
        "frozen  1 parameters  8,192 elements",
    ]
    assert lines[3] == ""
    assert lines[4].split() == ["optimizer", "parameter", "shape", "why"]
    assert len(lines) == 5 + len(PARAMETERS)
    column = lines[4].index("why")
    assert [line[column:] for line in lines[5:8]] == ["word embedding", "matrix", "matrix"]
    assert "256 x 32" in lines[5]
