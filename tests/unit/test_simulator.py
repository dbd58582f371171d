"""The simulator against a pipeline written from the equations, bit for bit, and against plain training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from impl.canzona.engine import Engine, EngineOptions
from impl.canzona.mesh import Mesh
from impl.canzona.strategies import make_plan
from impl.errors import ConfigError
from impl.harness.schedule import learning_rate
from impl.harness.spec import ScheduleSpec
from impl.models import gpt, weights
from impl.optimizers.base import create
from impl.rotation import resume
from impl.rotation.method import Method, create_method
from impl.rotation.partition import partition
from impl.rotation.rules import asynchronous, build
from impl.rotation.schedule import Schedule, staleness
from impl.rotation.simulator import Microbatches, build_stages, heldout_loss, params_digest, simulate, updates
from impl.rotation.stage import Stage
from impl.rotation.stage_parts import StageOptions
from impl.rotation.stash import Stash
from tests.distributed.ranks import one_rank
from tests.models import variant
from tests.unit.pipeline_reference import BETAS, Reference, stage_of

SMALL = {"num_hidden_layers": 5, "hidden_size": 16, "intermediate_size": 24, "head_dim": 4, "vocab_size": 64}
CONFIG = variant("qwen3-tiny", **SMALL)
TIED = variant("qwen3-tiny", **SMALL, tie_word_embeddings=True)
SPLITS = {1: [5], 2: [4, 1], 4: [1, 2, 1, 1]}
BATCH, SEQUENCE = 3, 9


@pytest.fixture(scope="module")
def mesh():
    with one_rank():
        torch.set_num_threads(1)
        yield Mesh.create(1, 1, torch.device("cpu"))


class Plain(Method):
    """AdamW with the betas of the reference."""

    name, display_name = "plain", "Plain"

    def matrix_optimizer(self, context):
        return create("adamw", {"betas": BETAS})

    elementwise_optimizer = matrix_optimizer


class Stream:
    """Random tokens, those of a step from its number."""

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        return torch.randint(CONFIG.arch.vocab_size, (BATCH, SEQUENCE + 1), generator=generator)

    def heldout(self) -> Tensor:
        return torch.cat([self.batch(1000 + i) for i in range(4)])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def rate_for(updates: int):
    """A rate that differs from update to update, also at the end."""
    return lambda update: learning_rate(ScheduleSpec(warmup_steps=3), 3e-2, update, updates)


def run(mesh, schedule: Schedule, counts: Sequence[int], *, method: Method | None = None, config=CONFIG, **options):
    method = method or Plain(Plain.Hyper())
    stages = build_stages(
        config, partition(config, len(counts), counts), schedule, method, mesh, rate_for(schedule.updates),
        options=StageOptions(**options),
    )  # fmt: skip
    return simulate(stages, schedule, Stream()), stages


def reference(mesh, counts: Sequence[int], segments: Sequence[int], *, per_update: int = 1, **settings) -> Reference:
    last = len(counts) - 1
    out = Reference(CONFIG, mesh.tp_group, stage_of(counts), len(counts), rate_for(sum(segments)))
    settings = {"delay": lambda k: last - k} | settings
    begin = 0
    for n in segments:
        batches = [Stream().batch(begin + t + 1).tensor_split(per_update) for t in range(n)]
        out.segment(batches, **settings)
        begin += n
    return out


CASES = [(p, segments) for p in SPLITS for segments in ([7, 4], [2], [3], [4, 1, 2])]


@pytest.mark.parametrize(("p", "segments"), CASES)
def test_equals_the_equations_bitwise(p, segments, mesh):
    """Updates below, at and above P - 1, uneven stages, several drained segments."""
    found, stages = run(mesh, asynchronous(p, segments), SPLITS[p])
    expected = reference(mesh, SPLITS[p], segments)
    assert found.losses == expected.losses
    assert found.params_digest == expected.digest()
    for stage in stages:
        state = stage.engine.state_dict()
        total = sum(t.double().sum().item() for key, t in state.items() if key.endswith("/second"))
        own = sum(t.double().sum().item() for n, t in expected.second.items() if expected.home[n] == stage.index)
        assert total == pytest.approx(own, rel=1e-9)
        assert stage.peak_stash_versions <= p - stage.index


@pytest.mark.parametrize("recompute", ["stage", "selective-attention"])
def test_recomputing_changes_nothing(recompute, mesh):
    schedule = asynchronous(4, [7, 3])
    kept, _ = run(mesh, schedule, SPLITS[4])
    again, stages = run(mesh, schedule, SPLITS[4], recompute=recompute)
    assert (again.params_digest, again.losses) == (kept.params_digest, kept.losses)
    flags = {module.recompute for s in stages for module in s.model.modules() if hasattr(module, "recompute")}
    assert flags == {recompute == "selective-attention"}
    assert [bool(s._keeps_graph) for s in stages] == [recompute != "stage"] * 3 + [True]  # the last one is never ahead


def test_stash_on_cpu_changes_nothing(mesh):
    schedule = asynchronous(4, 8)
    found, _ = run(mesh, schedule, SPLITS[4], recompute="stage", stash_on_cpu=True)
    assert found.params_digest == run(mesh, schedule, SPLITS[4])[0].params_digest
    with pytest.raises(ConfigError, match="recompute=stage"):
        run(mesh, schedule, SPLITS[4], stash_on_cpu=True)


@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize(
    "delay",
    [lambda k: 4 - k, lambda k: max(0, 2 - k), lambda k: 0, lambda k: 3],
    ids=["one-more", "one-less", "none", "everywhere"],
)
def test_control_other_delays_give_other_weights(delay, recompute, mesh):
    found, _ = run(mesh, asynchronous(4, [6, 5]), SPLITS[4], recompute=recompute)
    assert found.params_digest != reference(mesh, SPLITS[4], [6, 5], delay=delay).digest()


def test_control_without_drain_weights_are_other(mesh):
    drained, running_on = ([6, 5], SPLITS[4]), ([11], SPLITS[4])
    digests = [
        run(mesh, asynchronous(4, segments), counts)[0].params_digest for segments, counts in (drained, running_on)
    ]
    assert digests == [reference(mesh, counts, segments).digest() for segments, counts in (drained, running_on)]
    assert digests[0] != digests[1]


def test_control_drain_keeps_the_rate_moving(mesh):
    """The authors' drain reuses the last rate of the steady state; ours asks for the rate of every update."""
    schedule = asynchronous(4, 8)
    good = rate_for(8)
    frozen = Reference(CONFIG, mesh.tp_group, stage_of(SPLITS[4]), 4, lambda update: good(min(update, 5)))
    frozen.segment([[Stream().batch(t + 1)] for t in range(8)], lambda k: 3 - k)
    assert run(mesh, schedule, SPLITS[4])[0].params_digest != frozen.digest()


def test_control_without_rebinding_the_gradient_is_wrong(mesh, monkeypatch):
    """bug_cases A19: a graph refers to parameters, so its version must be bound when its backward runs."""
    schedule = asynchronous(4, 8)
    right = run(mesh, schedule, SPLITS[4])[0].params_digest
    bind = Stage._bind

    def lazy(self, use):
        if self.log and self.log[-1].kind == "B":
            return
        bind(self, use)

    monkeypatch.setattr(Stage, "_bind", lazy)
    assert run(mesh, schedule, SPLITS[4])[0].params_digest != right


def test_control_without_a_copy_the_gradient_is_wrong(mesh, monkeypatch):
    """bug_cases A19: the graph of a version that is updated in place under it."""
    schedule = asynchronous(4, 8)
    right = run(mesh, schedule, SPLITS[4])[0].params_digest
    monkeypatch.setattr(Stash, "copy_newest", lambda self: None)
    monkeypatch.setattr(Stash, "weights", lambda self, version: self._live)
    assert run(mesh, schedule, SPLITS[4])[0].params_digest != right


@pytest.mark.parametrize("p", [2, 4])
def test_vertical_sync_and_2bw(p, mesh):
    segments = [6, 3]
    found, _ = run(mesh, asynchronous(p, segments, "vertical-sync"), SPLITS[p])
    expected = reference(mesh, SPLITS[p], segments, version=lambda t, k: max(0, t - (p - 1)))
    assert (found.losses, found.params_digest) == (expected.losses, expected.digest())
    if p == 2:  # a batch of three sequences, so microbatches of two and of one
        found, _ = run(mesh, asynchronous(p, segments, "2bw", 2), SPLITS[p])
        expected = reference(mesh, SPLITS[p], segments, per_update=2, version=lambda t, k: max(0, t - 1))
        assert (found.losses, found.params_digest) == (expected.losses, expected.digest())
        assert found.peak_versions == (2, 2)


@pytest.mark.parametrize("name", ["gpipe", "1f1b-flush"])
@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_synchronous_pipelines_are_plain_accumulation(name, recompute, mesh):
    """Fewer microbatches than stages, and a short last one."""
    for p, microbatches in ((4, 2), (2, 3)):
        schedule = build(name, p, 5, per_update=microbatches)
        found, _ = run(mesh, schedule, SPLITS[p], recompute=recompute)
        expected = reference(mesh, SPLITS[p], [5], per_update=microbatches, delay=lambda k: 0)
        assert (found.losses, found.params_digest) == (expected.losses, expected.digest())
        assert set(found.peak_versions) == {1}


def test_no_stash_recomputes_on_the_newest_weights(mesh):
    """Against a chain of stages by hand: forward at (t - tau)+, then each stage again on its input at W[t]."""
    p, n = 4, 7
    schedule = asynchronous(p, n, "no-stash-recompute")
    found, _ = run(mesh, schedule, SPLITS[p])
    parts = partition(CONFIG, p, SPLITS[p])
    models = [gpt.build_model(CONFIG, mesh.tp_group, dtype=torch.float32, device="cpu", part=part) for part in parts]
    book = Reference(CONFIG, mesh.tp_group, stage_of(SPLITS[p]), p, rate_for(n))
    book.history = [dict(book.newest)]

    def load(model, values):
        for name, parameter in model.named_parameters():
            parameter.data, parameter.grad = values[name].clone(), None

    losses = []
    for t in range(n):
        ids, inputs, hidden = Stream().batch(t + 1), [], None
        for k, model in enumerate(models):
            inputs.append(None if hidden is None else hidden.detach().requires_grad_())
            load(model, book.history[max(0, t - (p - 1 - k))])
            with torch.no_grad():
                hidden = gpt.forward_stage(model, inputs[k], ids if k in (0, p - 1) else None)
        losses.append(hidden.item())
        gradients, grad = {}, None
        for k in reversed(range(p)):
            load(models[k], book.newest)
            out = gpt.forward_stage(models[k], inputs[k], ids if k in (0, p - 1) else None)
            out.backward(grad)
            grad = None if inputs[k] is None else inputs[k].grad
            gradients |= {name: q.grad for name, q in models[k].named_parameters()}
        book.adam(gradients)
    assert (found.losses, found.params_digest) == (losses, book.digest())
    assert found.peak_versions == (1, 1, 1, 1)
    assert found.params_digest != run(mesh, asynchronous(p, n), SPLITS[p])[0].params_digest


@pytest.mark.parametrize("config", [CONFIG, TIED], ids=["untied", "tied"])
def test_one_stage_is_plain_training_bitwise(config, mesh):
    model = gpt.build_model(config, mesh.tp_group, dtype=torch.float32, device="cpu")
    weights.initialize(model, config, 0, 0, 1)
    optimizer, parameters = create("adamw", {"betas": BETAS}), config.parameters(1)
    plan = make_plan("canzona", parameters, [optimizer] * len(parameters), 1, 1)
    engine = Engine(model, plan, {"adamw": optimizer}, mesh, EngineOptions())
    losses = []
    for step in range(1, 9):
        loss = gpt.loss(model, Stream().batch(step))
        with engine.microbatch(last=True):
            loss.backward()
        engine.step(rate_for(8)(step))
        losses.append(loss.item())
    found, _ = run(mesh, asynchronous(1, 8), [5], config=config)
    whole = weights.whole_parameters(model, config, mesh.tp_group)
    assert (found.losses, found.params_digest) == (losses, weights.params_digest(config, whole))


def test_fresh_weights_and_heldout_loss_do_not_depend_on_the_partition(mesh):
    digests, losses = set(), set()
    for counts in ([5], [4, 1], [1, 2, 1, 1], [0, 5], [0, 2, 0, 3, 0]):
        schedule = asynchronous(len(counts), 1)
        stages = build_stages(
            CONFIG, partition(CONFIG, len(counts), counts), schedule, Plain(Plain.Hyper()), mesh, rate_for(1)
        )
        digests.add(params_digest(stages))
        losses.add(heldout_loss(stages, Stream()))
    assert len(digests) == len(losses) == 1


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_stages_without_matrices_or_parameters_run(recompute, mesh):
    """bug_cases A18: embedding alone, nothing at all, head alone; the same delays, the same clip scopes."""
    counts = [0, 3, 0, 2, 0]
    found, stages = run(mesh, asynchronous(5, [9, 4]), counts, recompute=recompute)
    assert [len(list(s.model.parameters())) for s in stages] == [1, 24, 0, 16, 2]
    expected = reference(mesh, counts, [9, 4])
    assert (found.losses, found.params_digest) == (expected.losses, expected.digest())


def test_accumulation_under_delay(mesh):
    """bug_cases A21: two stages, two microbatches in an update; the last stage stashes nothing and does not fail."""
    schedule = build("1f1b-async", 2, 5, per_update=2)
    found, _ = run(mesh, schedule, SPLITS[2])
    assert found.staleness == (1, 0)
    assert found.peak_versions == (2, 1)
    assert found.params_digest == run(mesh, schedule, SPLITS[2], recompute="stage")[0].params_digest


def test_the_log_is_the_schedule(mesh):
    schedule = asynchronous(4, [6, 2])
    found, _ = run(mesh, schedule, SPLITS[4])
    assert [tuple(e) for e in found.log] == [
        (k, a.kind, a.number, a.version) for k, actions in enumerate(schedule.actions) for a in actions
    ]


def test_clip_is_per_stage(mesh):
    """bug_cases A22: a stage clips by its own norm alone."""
    rows = []
    schedule = asynchronous(2, 1)
    stages = build_stages(CONFIG, partition(CONFIG, 2, [4, 1]), schedule, Plain(Plain.Hyper()), mesh, rate_for(1))
    simulate(stages, schedule, Stream(), report=rows.append)
    whole = build_stages(CONFIG, partition(CONFIG, 1), asynchronous(1, 1), Plain(Plain.Hyper()), mesh, rate_for(1))
    simulate(whole, asynchronous(1, 1), Stream(), report=rows.append)
    (a, b), (both,) = rows[0].grad_norms, rows[1].grad_norms
    assert a**2 + b**2 == pytest.approx(both**2, rel=1e-6)
    assert min(a, b) < both


class Spy(Plain):
    """Notes the weights that its hooks are shown, for each stage by the number of elements."""

    def __init__(self) -> None:
        super().__init__(self.Hyper())
        self.seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def correct(self, gradient, newest, stale, memory):
        assert gradient.shape == newest.shape == stale.shape
        self.seen.setdefault(len(newest), []).append((newest.clone(), stale.clone()))


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_correction_sees_newest_and_stale_weights(recompute, mesh):
    spy, p, n = Spy(), 4, 8
    found, stages = run(mesh, asynchronous(p, n), [2, 1, 1, 1], method=spy, recompute=recompute)
    assert found.params_digest == run(mesh, asynchronous(p, n), [2, 1, 1, 1])[0].params_digest
    assert found.peak_versions == (4, 3, 2, 1)
    for stage in (stages[0], stages[1], stages[3]):
        if stage.index == 1:
            continue  # as large as stage 2
        tau, pairs = p - 1 - stage.index, spy.seen[len(stage.engine.weights[0])]
        assert len(pairs) == n
        for t, (newest, stale) in enumerate(pairs):
            assert torch.equal(stale, pairs[max(0, t - tau)][0])
            assert t == 0 or not torch.equal(newest, pairs[t - 1][0])


class Predicting(Plain):
    """Adds tau times the last step."""

    def predict(self, newest, memory, context, lr):
        step = memory.get("update")
        return None if step is None or context.staleness < 1 else newest.add(step, alpha=context.staleness)


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_forward_and_backward_run_on_predicted_weights(recompute, mesh):
    segments = [9]
    found, _ = run(mesh, asynchronous(4, segments), SPLITS[4], method=Predicting(Plain.Hyper()), recompute=recompute)
    expected = reference(mesh, SPLITS[4], segments, predict=True)
    assert (found.losses, found.params_digest) == (expected.losses, expected.digest())


class Backward(Plain):
    """Runs the backward where a step of memory says; zero steps change nothing."""

    def __init__(self, factor: float) -> None:
        super().__init__(self.Hyper())
        self.factor = factor

    def backward_weights(self, newest, memory, context):
        step = memory.get("update")
        return None if step is None else newest.sub(step, alpha=self.factor)


@pytest.mark.parametrize(("segments", "per_update"), [([4, 4], 1), ([4], 3)], ids=["refilled", "accumulated"])
def test_predictions_reach_as_far_as_the_delay(segments, per_update, mesh):
    """By the updates that the gradient of the microbatch will wait for, fewer while the pipeline fills."""
    asked = []

    class Recording(Plain):
        def predict(self, newest, memory, context, lr):
            asked.append((context.stage, context.staleness))
            return None

    schedule = asynchronous(3, segments, per_update=per_update)
    _, stages = run(mesh, schedule, [2, 2, 1], method=Recording(Plain.Hyper()))
    for stage in stages:
        forwards = [entry for entry in stage.log if entry.kind == "F"]
        delays = [schedule.update_of(entry.number) - entry.version for entry in forwards]
        assert [delay for k, delay in asked if k == stage.index] == [d for d in delays for _ in stage.memory]
    assert len(set(asked)) > 3, "otherwise nothing is shown"


def test_backward_weights_replace_the_newest_without_a_stash(mesh):
    schedule = asynchronous(4, 7, "no-stash-recompute")
    plain = run(mesh, schedule, SPLITS[4])[0].params_digest
    assert run(mesh, schedule, SPLITS[4], method=Backward(0.0))[0].params_digest == plain
    assert run(mesh, schedule, SPLITS[4], method=Backward(1.0))[0].params_digest != plain


def test_rates_and_settings_of_the_method_count(mesh):
    class Halved(Plain):
        def lr(self, lr, update, context):
            return lr / 2 if context.staleness else lr

    schedule = asynchronous(2, 4)
    found, stages = run(mesh, schedule, SPLITS[2], method=Halved(Plain.Hyper()))
    assert [s.lr(4) for s in stages] == [rate_for(4)(4) / 2, rate_for(4)(4)]
    assert found.params_digest != run(mesh, schedule, SPLITS[2])[0].params_digest

    class Mixed(Plain):
        def elementwise_optimizer(self, context):
            return create("adamw", {"betas": (0.5, 0.5)})

    with pytest.raises(ConfigError, match="twice with different settings"):
        run(mesh, schedule, SPLITS[2], method=Mixed(Plain.Hyper()))


def test_matrix_optimizers_step_each_stage(mesh):
    class Rotating(Plain):
        def matrix_optimizer(self, context):
            return create("muon")

    counts = [0, 3, 0, 2, 0]
    found, stages = run(mesh, asynchronous(5, 4), counts, method=Rotating(Plain.Hyper()))
    assert not found.diverged
    assert [[f.name for f in s.engine.plan.families] for s in stages] == [
        ["elementwise"], ["matrix", "elementwise"], [], ["matrix", "elementwise"], ["elementwise"]]  # fmt: skip
    assert found.params_digest == run(mesh, asynchronous(5, 4), counts, method=Rotating(Plain.Hyper()),
                                      recompute="stage")[0].params_digest  # fmt: skip


def poisoned(stages, update, monkeypatch):
    """Let one matrix of the last stage get an infinite gradient at 0-based ``update``."""
    last, step = stages[-1], stages[-1].engine.step

    def adjusted(lr, adjust=None):
        if sum(entry.kind == "U" for entry in last.log) == update + 1:
            matrix = next(i for i, f in enumerate(last.engine.plan.families) if f.name == "matrix")
            last.engine.gradients[matrix][0] = math.inf
        return step(lr, adjust)

    monkeypatch.setattr(last.engine, "step", adjusted)


@pytest.mark.parametrize("update", [2, 5])
@pytest.mark.parametrize("method", ["basis-rotation", "muon"])
def test_a_gradient_that_is_not_finite_does_not_end_the_run(update, method, mesh, monkeypatch):
    """Whether at the last update, where no loss can tell, or before: the stage skips it."""
    schedule = asynchronous(2, 6)
    stages = build_stages(
        CONFIG, partition(CONFIG, 2, SPLITS[2]), schedule, create_method(method), mesh, rate_for(6),
        options=StageOptions(clip=0.0),
    )  # fmt: skip
    poisoned(stages, update, monkeypatch)
    found = simulate(stages, schedule, Stream())
    assert not found.diverged
    assert found.params_digest is not None
    assert len(found.losses) == 6
    assert [stage.skipped_updates for stage in stages] == [0, 1]


def test_a_diverged_run_ends_early(mesh):
    schedule = asynchronous(2, 50)
    stages = build_stages(
        CONFIG, partition(CONFIG, 2), schedule, Plain(Plain.Hyper()), mesh, lambda update: 1e38,
        options=StageOptions(clip=0.0),
    )  # fmt: skip
    found = simulate(stages, schedule, Stream())
    assert found.diverged
    assert len(found.losses) < 50
    assert found.params_digest is None


def test_batches_too_small_for_the_microbatches_are_refused():
    with pytest.raises(ConfigError, match="3 sequences cannot be cut into 4"):
        Microbatches(Stream(), 4)(0)
    parts = [Microbatches(Stream(), 2)(i) for i in range(2)]
    assert [len(p) for p, _ in parts] == [2, 1]
    assert sum(share for _, share in parts) == 1.0


def test_heldout_is_that_of_the_newest_weights(mesh):
    schedule = asynchronous(4, 5)
    stages = build_stages(CONFIG, partition(CONFIG, 4, SPLITS[4]), schedule, Plain(Plain.Hyper()), mesh, rate_for(5))
    found = simulate(stages, schedule, Stream(), eval_every=2)
    assert [step for step, _ in found.heldout] == [2, 4, 5]
    # evaluating changes nothing, and the pipeline holds the weights of update 2 on every stage then
    quiet, _ = run(mesh, schedule, SPLITS[4])
    assert quiet.params_digest == found.params_digest
    expected = reference(mesh, SPLITS[4], [5])
    for step, loss in found.heldout:
        expected.load(expected.history[step])
        with torch.no_grad():
            chunks = Stream().heldout().split(8)
            mean = sum(gpt.loss(expected.model, c).double().item() * len(c) for c in chunks) / 12
        assert loss == pytest.approx(mean, rel=1e-12)
    assert staleness(schedule) == found.staleness == (3, 2, 1, 0)


class Unread(Stream):
    """Refuses what has been read before, as data that can only be read in order do."""

    def __init__(self, done: int) -> None:
        self.done = done

    def batch(self, step: int) -> Tensor:
        assert step > self.done
        return super().batch(step)


class Remembering(Predicting):
    """Uses every hook with a memory."""

    def correct(self, gradient, newest, stale, memory):
        memory["mean"] = memory.get("mean", torch.zeros_like(gradient)).mul_(0.5).add_(gradient, alpha=0.5)
        gradient.add_(memory["mean"], alpha=0.1)


@pytest.mark.parametrize("at", [2, 5, 6, 9])
@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize(
    ("mode", "per_update", "method"),
    [("stash", 1, Plain), ("stash", 1, Remembering), ("no-stash-recompute", 1, Plain), ("2bw", 3, Plain)],
)
def test_resume_in_flight_and_drained(mode, per_update, method, recompute, at, mesh):
    """Segments of six and five updates: after the sixth the pipeline is drained, elsewhere it is not."""
    p = 4 if per_update == 1 else 2
    schedule = asynchronous(p, [6, 5], mode, per_update)

    def fresh():
        parts, options = partition(CONFIG, p, SPLITS[p]), StageOptions(recompute=recompute)
        return build_stages(CONFIG, parts, schedule, method(Plain.Hyper()), mesh, rate_for(11), options=options)

    straight, whole = fresh(), fresh()
    expected = simulate(straight, schedule, Stream())
    batches = Microbatches(Stream(), per_update)
    rows = updates(whole, schedule, Stream(), microbatches=batches)
    losses = [next(rows).loss for _ in range(at)]
    saved = [{key: t.clone() for key, t in resume.state_dict(stage).items()} for stage in whole]
    assert any(stage.flight for stage in whole) == (at != 6)
    again = fresh()
    for stage, state in zip(again, saved, strict=True):
        resume.load_state_dict(stage, state)
    rest = Microbatches(Unread(at), per_update)
    rest.load_state_dict(*batches.state_dict())
    found = simulate(again, schedule, Stream(), microbatches=rest)
    assert losses + found.losses == expected.losses
    assert (found.params_digest, found.log) == (expected.params_digest, expected.log)
    assert found.peak_versions == expected.peak_versions


@pytest.mark.parametrize(
    ("lost", "method"),
    [("/second", Plain), ("version/", Plain), ("/hidden", Plain), ("/weights/", Remembering), ("memory/", Remembering)],
)
def test_control_a_state_without_a_part_leads_elsewhere(lost, method, mesh):
    schedule = asynchronous(4, 8)

    def fresh():
        return build_stages(CONFIG, partition(CONFIG, 4), schedule, method(Plain.Hyper()), mesh, rate_for(8))

    stages = fresh()
    rows = updates(stages, schedule, Stream())
    for _ in range(5):
        next(rows)
    again = fresh()
    for stage, new in zip(stages, again, strict=True):
        state = {key: torch.zeros_like(t) if lost in key else t.clone() for key, t in resume.state_dict(stage).items()}
        resume.load_state_dict(new, state)
    assert simulate(again, schedule, Stream()).params_digest != run_to_the_end(rows, stages)


def run_to_the_end(rows, stages) -> str:
    for _ in rows:
        pass
    return params_digest(stages)


def test_states_are_taken_between_updates_and_by_fresh_stages(mesh):
    schedule = build("1f1b-async", 1, 2, per_update=3)
    (stage,) = build_stages(CONFIG, partition(CONFIG, 1), schedule, Plain(Plain.Hyper()), mesh, rate_for(2))
    state = resume.state_dict(stage)
    tokens, share = Microbatches(Stream(), 3)(0)
    stage.forward(0, None, 0, tokens)
    with pytest.raises(RuntimeError, match="fresh"):
        resume.load_state_dict(stage, state)
    stage.backward(0, None, 0, share)
    with pytest.raises(RuntimeError, match="between updates"):
        resume.state_dict(stage)
