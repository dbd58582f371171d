"""Stages as parts of a model: every layer once, names and weights as in the whole model."""

import pytest
import torch

from impl.errors import ConfigError
from impl.models import catalogue, gpt, weights
from impl.rotation.partition import partition
from tests.distributed.ranks import one_rank
from tests.models import tokens, variant


@pytest.fixture(scope="module")
def group():
    with one_rank() as group:
        yield group


def build(config, group, part=None):
    model = gpt.build_model(config, group, dtype=torch.float32, device="cpu", part=part)
    weights.initialize(model, config, 3, 0, 1, part)
    return model


@pytest.mark.parametrize("layers", [1, 2, 7, 8, 10, 32])
def test_every_layer_is_on_one_stage(layers: int):
    """bug_cases A20: also where the stages do not divide the layers."""
    config = catalogue.load("qwen3-tiny", layers)
    whole = [p.name for p in config.parameters(1)]
    for stages in range(1, layers + 1):
        parts = partition(config, stages)
        assert [p.name for part in parts for p in config.parameters(1, part)] == whole
        assert all(part.layers >= 1 for part in parts)
        assert [part.embedding for part in parts] == [True] + [False] * (stages - 1)
        assert [part.head for part in parts] == [False] * (stages - 1) + [True]
        for layer in range(layers):
            stage = layer * stages // layers
            assert parts[stage].first <= layer < parts[stage].last


def test_ten_layers_on_three_stages():
    assert [p.layers for p in partition(catalogue.load("qwen3-tiny", 10), 3)] == [4, 3, 3]


@pytest.mark.parametrize(
    ("stages", "counts", "message"),
    [
        (9, None, "8 layers, too few for 9 stages"),
        (0, None, "at least 1 stage"),
        (3, [4, 4], "give 3 numbers that add up to 8"),
        (2, [4, 3], "give 2 numbers that add up to 8"),
        (2, [9, -1], "give 2 numbers that add up to 8"),
    ],
)
def test_bad_partitions_are_refused(stages, counts, message):
    with pytest.raises(ConfigError, match=message):
        partition(catalogue.load("qwen3-tiny"), stages, counts)


def test_a_tied_head_is_refused_on_several_stages():
    config = variant("qwen3-tiny", tie_word_embeddings=True)
    assert len(partition(config, 1)) == 1
    with pytest.raises(ConfigError, match="two delays"):
        partition(config, 2)


@pytest.mark.parametrize("counts", [[8], [4, 4], [1, 5, 2], [0, 3, 0, 5, 0]])
@pytest.mark.parametrize("name", ["qwen3-tiny", "llama-tiny"])
def test_stages_are_the_whole_model(name, counts, group):
    """bug_cases A18 too: stages without matrices, and one without any parameter."""
    config = catalogue.load(name)
    whole, ids = build(config, group), tokens(config)
    expected = weights.params_digest(config, weights.whole_parameters(whole, config, group))
    parts = partition(config, len(counts), counts)
    models = [build(config, group, part) for part in parts]
    named = [n for m in models for n, _ in m.named_parameters()]
    assert named == [n for n, _ in whole.named_parameters()]
    every = (pair for m in models for pair in weights.whole_parameters(m, config, group, m.part))
    assert weights.params_digest(config, every) == expected
    hidden = None
    for model in models:
        ends = model.part.embedding or model.part.head
        hidden = gpt.forward_stage(model, hidden, ids if ends else None)
    assert torch.equal(hidden, gpt.loss(whole, ids))


def test_wrong_inputs_of_a_stage_are_refused(group):
    config = catalogue.load("qwen3-tiny", 2)
    first, last = (build(config, group, part) for part in partition(config, 2))
    ids = tokens(config)
    hidden = gpt.forward_stage(first, None, ids)
    for model, arguments in (
        (first, (hidden, ids)),
        (first, (None, None)),
        (last, (None, ids)),
        (last, (hidden, None)),
    ):
        with pytest.raises(ValueError, match="first stage takes tokens"):
            gpt.forward_stage(model, *arguments)
