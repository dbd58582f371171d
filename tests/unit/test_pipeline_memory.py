"""Bytes of every stage: what the plan of a run says, what the runtime's stash does, and counts by hand."""

import numpy as np
import pytest

from impl.harness.pipeline_plan import planned
from impl.harness.pipeline_spec import PipelineSpec
from impl.models import catalogue
from impl.projection.activations import activation_bytes, boundary_bytes, embedding_bytes, head_bytes
from impl.projection.machine import BYTES
from impl.projection.pipeline_costs import full
from impl.projection.pipeline_memory import StageMemory, largest_rows, memory, misfit
from impl.rotation.method import StageContext, create_method
from impl.rotation.schedule import peak_versions

pytestmark = pytest.mark.timeout(120)


def settings(method: str, stages: int = 4, **more: object) -> PipelineSpec:
    own = {"layers": 2 * stages, "batch": 2 * stages, "sequence": 16, "steps": 40, "recompute": "stage", **more}
    return PipelineSpec(model="qwen3-tiny", method=method, stages=stages, **own)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush", "pipedream-2bw", "pipedream", "basis-rotation"])
def test_weights_stash_and_state_are_those_of_the_plan(method):
    spec = settings(method)
    found, plan = memory(spec), list(planned(spec))
    names = (("weights", "weight_bytes"), ("stash", "stash_bytes"), ("state", "state_bytes"))
    for own, name in names:
        assert [getattr(stage, own) for stage in found] == [p.value for p in plan if p.quantity == name]
    assert all(stage.early == stage.masters == 0 for stage in found)


@pytest.mark.parametrize("mode", ["stash", "vertical-sync", "no-stash-recompute"])
def test_stashed_versions_are_the_most_that_the_schedule_needs(mode):
    spec = settings("pipedream", mode=mode)
    versions = peak_versions(full(spec, "float32").setup.schedule)
    for stage, count in zip(memory(spec), versions, strict=True):
        assert stage.stash == (count - 1) * stage.weights
    if mode == "stash":
        assert versions == (4, 3, 2, 1)


def test_a_graph_that_outlives_an_update_needs_one_version_more():
    kept, again = memory(settings("pipedream", recompute="none")), memory(settings("pipedream"))
    assert [stage.early // stage.weights for stage in kept] == [1, 1, 1, 0]
    assert [stage.early for stage in again] == [0, 0, 0, 0]
    assert [stage.stash for stage in kept] == [stage.stash for stage in again]


def test_a_stash_in_host_memory_leaves_one_version_on_its_way():
    own, away = memory(settings("pipedream")), memory(settings("pipedream", stash_on_cpu=True))
    assert [stage.host for stage in away] == [stage.stash for stage in own]
    assert [stage.stash for stage in away] == [stage.weights if stage.stash else 0 for stage in own]
    assert away[0].total == own[0].total - own[0].stash + own[0].weights


def test_bfloat16_halves_what_is_computed_with_and_adds_masters():
    wide, narrow = memory(settings("pipedream")), memory(settings("pipedream"), "bfloat16")
    for a, b in zip(wide, narrow, strict=True):
        assert (b.weights, b.masters) == (a.weights / 2, a.weights)
        assert (b.gradients, b.state, b.stash) == (a.gradients, a.state, a.stash / 2)
        assert a.activations / 2 <= b.activations < a.activations


def test_activations_in_flight_by_hand():
    spec = settings("1f1b-flush", stages=2, layers=2, batch=4, microbatches=4, recompute="none")
    arch = catalogue.load(spec.model, 2).arch
    layer = activation_bytes(arch, 16, 4, 1, "none", False)
    found = memory(spec)
    assert found[0].activations == 2 * (layer + embedding_bytes(16))
    assert found[1].activations == layer + head_bytes(arch, 16, 4, 1).kept
    together = memory(settings("gpipe", stages=2, layers=2, batch=4, microbatches=4, recompute="none"))
    assert together[0].activations == 2 * found[0].activations
    assert together[1].activations == 4 * found[1].activations


def test_recomputing_a_stage_keeps_inputs_and_one_graph():
    spec = settings("gpipe", stages=2, layers=2, batch=4, microbatches=4)
    arch = catalogue.load(spec.model, 2).arch
    layer = activation_bytes(arch, 16, 4, 1, "none", False)
    first, last = memory(spec)
    assert first.activations == 3 * embedding_bytes(16) + layer + embedding_bytes(16)
    assert last.activations == 3 * boundary_bytes(arch, 16, 4) + layer + head_bytes(arch, 16, 4, 1).kept


def test_activations_of_a_layer_by_hand():
    arch = catalogue.load("llama-7b").arch
    h, f, heads = 4096, 11008, 32
    # one token in bf16, queries as wide as the model: norms and products, fused qkv, what attention reads and gives
    every = 2 * (4 * h + 3 * h + 2 * h + h + 5 * f) + 4 * (2 + heads)
    assert activation_bytes(arch, 1, 2, 1, "none", False) == every
    assert activation_bytes(arch, 1, 2, 1, "selective-attention", False) == every - 4 * heads
    assert activation_bytes(arch, 1, 2, 1, "layer", False) == 2 * h
    assert activation_bytes(arch, 1, 2, 1, "stage", False) == 0
    everywhere = 2 * 4 * h + 4 * 2
    assert activation_bytes(arch, 1, 2, 8, "none", False) == everywhere + (every - everywhere) / 8
    assert activation_bytes(arch, 1, 2, 8, "none", True) == every / 8
    # Korthikanti et al. have 34 s b h for a layer with GELU, 4 h wide and dropout, fused attention; SwiGLU unfused more
    assert 34 * h < every < 50 * h


def test_grouped_heads_and_normed_queries_are_counted():
    arch = catalogue.load("qwen3-8b").arch
    heads, groups, d = arch.num_attention_heads, arch.num_key_value_heads, arch.head_dim
    width = 4 * arch.hidden_size + (4 * heads + 3 * groups) * d + 5 * arch.intermediate_size
    assert groups < heads
    assert activation_bytes(arch, 1, 2, 1, "selective-attention", False) == 2 * width + 4 * (2 + heads + groups)


@pytest.mark.parametrize(
    ("source", "geometry", "squares"),
    [("2nd", "bilateral", 84), ("1st", "bilateral", 42), ("2nd", "unilateral", 12), ("1st", "unilateral", 6)],
)
def test_state_of_a_rotated_gpt_block(source, geometry, squares):
    d = 64
    method = create_method("basis-rotation", {"source": source, "geometry": geometry})
    rule = method.matrix_optimizer(StageContext(0, 1, 0, 10))
    shapes = [*[(d, d)] * 4, (4 * d, d), (d, 4 * d)]
    floats = sum(rule.state_bytes(shape) for shape in shapes) / 4  # with a few scalars a matrix
    adam = 2 * 12 * d * d
    assert floats - adam == pytest.approx(squares * d * d, rel=0.002)
    assert floats - adam != pytest.approx((squares + 6) * d * d, rel=0.002)


def test_the_line_of_what_does_not_fit():
    def stage(number: int, weights: float) -> StageMemory:
        return StageMemory(number, int(weights), 0, 0, 0, 0, 0, 0.0, 0.0, 0.0)

    stages = stage(0, 31.4e9), stage(1, 20e9)
    assert misfit(stages, 25_000_000_000) == "needs 31.4 GB on stage 0, the card has 25.0 GB"
    assert misfit(stages, int(31.4e9)) is None
    assert misfit(stages, None) is None


def test_the_largest_microbatch_fits_and_one_more_does_not():
    spec = settings("1f1b-flush", batch=4)
    limit = max(int(stage.total) + 1 for stage in memory(spec.model_copy(update={"batch": 4 * 13})))
    most, none = largest_rows(spec, "float32", [limit, 1000])
    assert misfit(memory(spec.model_copy(update={"batch": 4 * most})), limit) is None
    assert misfit(memory(spec.model_copy(update={"batch": 4 * (most + 1)})), limit) is not None
    assert most == 13
    assert none == 0


def test_larger_micro_groups_need_more_while_they_are_updated():
    spec = settings("basis-rotation")
    one, many = (memory(spec, capacity_bytes=size)[0] for size in (1, 2**40))
    shapes = [p.shape for p in catalogue.load(spec.model, 8).parameters(1) if len(p.shape) == 2]
    assert one.working < many.working
    assert np.isclose(one.total - one.working, many.total - many.working)
    assert BYTES["float32"] * 4 * max(a * b for a, b in shapes[1:-1]) <= many.working
