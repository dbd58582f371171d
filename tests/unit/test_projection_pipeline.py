"""Pipelines on a timeline: hand-computed cases, conservation, and what must make a projection faster or slower."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest

from impl.errors import ConfigError
from impl.harness.pipeline_spec import PipelineSpec
from impl.models import catalogue
from impl.optimizers.base import Optimizer, Shape
from impl.projection import hardware
from impl.projection.hardware import Group
from impl.projection.machine import BYTES, Block, Roofline
from impl.projection.pipeline import SEND, PipelineProjection, project
from impl.projection.pipeline_costs import full
from impl.projection.uncertain import Cost, exact
from impl.rotation.gantt import bubble, timeline

pytestmark = pytest.mark.timeout(120)
FORWARD, BACKWARD, UPDATE = 1.0, 2.0, 0.5


def certain(seconds: float) -> Cost:
    return Cost.of(exact(seconds), "toy")


@dataclass
class Toy:
    """A machine with given times: a forward of a layer, a backward, an update of each matrix, bytes a second."""

    forward_s: float = FORWARD
    backward_s: float = BACKWARD
    apply_s: float = UPDATE
    head_s: float = 0.0
    bandwidth: float = float("inf")
    copy_s: float = 0.0
    norm_s: float = 0.0
    shared: bool = False
    cores: int | None = None
    name: str = "toy"
    memory_bytes: int | None = None
    devices_per_node: int = 8

    def _block(self, block: Block, seconds: float) -> Cost:
        length = {"layer": seconds, "embedding": 0.0, "head": self.head_s}[block.kind]
        return Cost.of(exact(length * block.rows), "toy")

    def forward(self, block: Block) -> Cost:
        return self._block(block, self.forward_s)

    def attention(self, block: Block) -> Cost:
        return self._block(block, self.forward_s / 4)

    def backward(self, block: Block) -> Cost:
        return self._block(block, self.backward_s)

    def gradients(self, block: Block) -> Cost:
        return Cost.nothing()

    def update(self, optimizer: Optimizer, shape: Shape) -> Cost:
        return Cost.nothing()

    def apply(self, elements: int, dtype: str) -> Cost:
        return Cost.of(exact(self.apply_s), "toy")

    def norm(self, elements: int, *, exact: bool = False) -> Cost:
        return certain(self.norm_s) if exact else Cost.nothing()

    def copy(self, count: float, where: str) -> Cost:
        return Cost.of(exact(self.copy_s), "toy")

    def collective(self, kind: str, sizes: Sequence[float], group: Group) -> Cost:
        assert kind == "send"
        far = 10.0 if group.stride > 1 else 1.0
        return Cost.of(exact(far * sum(sizes) / self.bandwidth), "toy link")


def settings(method: str, stages: int, **more: object) -> PipelineSpec:
    """One layer a stage, microbatches of one sequence unless told otherwise."""
    own = {"layers": stages, "batch": 1, "sequence": 16, "recompute": "none", **more}
    return PipelineSpec(model="qwen3-tiny", method=method, stages=stages, **own)  # type: ignore[arg-type]


def nominal(found: PipelineProjection) -> float:
    return float(found.update_s[0])


def message(spec: PipelineSpec, rows: int = 1) -> float:
    arch = catalogue.load(spec.model, spec.layers).arch
    return BYTES["float32"] * (rows * spec.sequence * arch.hidden_size + 1)


def test_one_stage_is_the_sum_of_its_parts():
    found = project(settings("pipedream", 1, layers=3), Toy(head_s=0.25))
    assert nominal(found) == pytest.approx(3 * FORWARD + 3 * BACKWARD + 2 * 0.25 + UPDATE)
    assert found.bubble[0] == pytest.approx(0.0)
    assert found.exposed_s[0] == 0


@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush"])
def test_two_stages_that_drain_by_hand(method):
    # m microbatches through two equal stages: (m + 1) (F + B) and the update of both at their own end
    found = project(settings(method, 2, batch=4, microbatches=4), Toy())
    assert nominal(found) == pytest.approx(5 * (FORWARD + BACKWARD) + UPDATE)
    assert found.bubble[0] == pytest.approx(1 - (4 * (FORWARD + BACKWARD) + UPDATE) / nominal(found))


def test_two_stages_without_drain_by_hand():
    found = project(settings("pipedream", 2), Toy())
    assert nominal(found) == pytest.approx(FORWARD + BACKWARD + UPDATE)
    assert found.bubble[0] == pytest.approx(0.0)


def test_a_slower_last_stage_sets_the_pace_and_the_other_waits():
    found = project(settings("pipedream", 2), Toy(head_s=0.5))
    busy = FORWARD + BACKWARD + UPDATE
    assert nominal(found) == pytest.approx(busy + 1.0)
    assert found.bubble[0] == pytest.approx(1 - (2 * busy + 1.0) / (2 * (busy + 1.0)))


def test_two_stages_with_messages_by_hand():
    spec = settings("gpipe", 2, batch=2, microbatches=2)
    c = 0.25
    found = project(spec, Toy(bandwidth=message(spec) / c))
    # F0 F1 B0 B1 on the last stage; the first stage waits for both gradients on their way back
    assert nominal(found) == pytest.approx(3 * (FORWARD + BACKWARD) + 2 * c + UPDATE)
    assert found.exposed_s[0] == pytest.approx(2 * c)


def test_stages_that_share_a_core_take_the_sum_of_their_work():
    spec = settings("pipedream", 4, steps=40)
    alone, two, one = (project(spec, Toy(shared=True, cores=cores), as_run=True) for cores in (None, 2, 1))
    work = 4 * (FORWARD + BACKWARD + UPDATE)
    assert nominal(alone) == pytest.approx(work / 4)
    assert nominal(two) == pytest.approx(work / 2)
    assert nominal(one) == pytest.approx(work)


def test_shared_cores_pay_for_a_message_on_both_sides():
    spec = settings("gpipe", 2, batch=1, microbatches=1)
    c = 0.25
    alone = project(spec, Toy(bandwidth=message(spec) / c))
    shared = project(spec, Toy(bandwidth=message(spec) / c, shared=True))
    assert nominal(alone) == pytest.approx(2 * (FORWARD + BACKWARD) + 2 * c + UPDATE)
    assert nominal(shared) == pytest.approx(2 * (FORWARD + BACKWARD) + 4 * c + UPDATE)


@pytest.mark.parametrize(
    ("method", "recompute", "added"),
    [("gpipe", "stage", FORWARD), ("gpipe", "selective-attention", FORWARD / 4), ("gpipe", "none", 0.0)],
)
def test_recomputation_is_paid_in_the_backward(method, recompute, added):
    spec = settings(method, 2, batch=4, microbatches=4, recompute=recompute)
    assert nominal(project(spec, Toy())) == pytest.approx(5 * (FORWARD + BACKWARD + added) + UPDATE)


def test_the_last_stage_does_not_recompute_what_comes_next():
    found = project(settings("pipedream", 2, recompute="stage"), Toy())
    again = {slot.stage for slot in found.track.slots if slot.phase == "recompute"}
    assert again == {0}


def test_stashed_versions_are_copied_once_an_update():
    found = project(settings("pipedream", 3, recompute="stage"), Toy(copy_s=0.125))
    assert nominal(found) == pytest.approx(2 * FORWARD + BACKWARD + UPDATE + 0.125)
    copies = [slot.stage for slot in found.track.slots if slot.phase == "stash"]
    assert set(copies) == {0, 1}
    drained = project(settings("gpipe", 3, batch=3), Toy(copy_s=0.125))
    assert not [slot for slot in drained.track.slots if slot.phase == "stash"]


@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush", "pipedream-2bw", "pipedream"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_equal_stages_and_free_messages_are_the_planned_chart(method, stages):
    many = 1 if method == "pipedream" else stages
    spec = settings(method, stages, batch=many, microbatches=many, steps=9)
    found = project(spec, Toy(), as_run=True)
    bars = timeline(found.pipeline.setup.schedule, {"F": FORWARD, "B": BACKWARD, "U": UPDATE})
    assert found.track.bubble()[0] == pytest.approx(bubble(bars))
    ours = {(bar.stage, bar.action): (bar.start, bar.end) for bar in found.track.bars()}
    assert ours == {(bar.stage, bar.action): pytest.approx((bar.start, bar.end)) for bar in bars}
    # negative control: a stage that takes longer is another chart
    other = project(spec, Toy(head_s=0.5), as_run=True)
    assert bool(other.track.bubble()[0] == pytest.approx(bubble(bars))) is (stages == 1)


@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush", "pipedream-2bw", "pipedream"])
@pytest.mark.parametrize("shared", [False, True])
def test_no_stream_overlaps_itself_and_nothing_runs_before_its_message(method, shared):
    spec = settings(method, 3, batch=6, microbatches=None if method == "pipedream" else 3)
    found = project(spec, Toy(bandwidth=message(spec, 2) / 0.7, shared=shared))
    streams = defaultdict(list)
    for slot in found.track.slots:
        streams[slot.stage, slot.stream].append(slot)
    for slots in streams.values():
        assert all((a.end <= b.start + 1e-9).all() for a, b in pairwise(slots))
    sent = {(s.stage, s.action.kind, s.action.number): s for s in found.track.slots if s.bytes}
    for slot in found.track.slots:
        if slot.phase == "forward" and slot.stage:
            assert (sent[slot.stage - 1, "F", slot.action.number].end <= slot.start + 1e-9).all()
        if slot.phase == "backward" and slot.stage < 2:
            assert (sent[slot.stage + 1, "B", slot.action.number].end <= slot.start + 1e-9).all()


@pytest.mark.parametrize("shared", [False, True])
def test_every_message_is_counted_once(shared):
    spec = settings("pipedream-2bw", 4, batch=9, microbatches=4)  # microbatches of 3, 2, 2 and 2
    found = project(spec, Toy(shared=shared))
    schedule = found.pipeline.setup.schedule
    per_update = message(spec, 3) + 3 * message(spec, 2)
    assert found.track.bytes() == {name: pytest.approx(3 * schedule.updates * per_update) for name in SEND.values()}


def test_a_run_is_as_long_as_its_window_says():
    for method in ("pipedream", "pipedream-2bw", "1f1b-flush"):
        many = None if method == "pipedream" else 4
        spec = settings(method, 4, batch=8, microbatches=many, steps=80)
        toy = Toy(head_s=0.3, bandwidth=message(spec, 2) / 0.9)
        ends = [float(end[0]) for end in project(spec, toy, as_run=True).track.ends]
        assert nominal(project(spec, toy)) == pytest.approx((ends[60] - ends[20]) / 40)


def test_a_slow_first_stage_sets_the_pace_while_the_last_works_off_its_queue():
    # layers 3, 2, 2, 2 and a head that almost levels this: the queue of the last stage lasts for dozens of updates
    spec = settings("pipedream", 4, layers=9, layer_counts=(3, 2, 2, 2), steps=400)
    toy = Toy(head_s=0.96 * (FORWARD + BACKWARD) / 2)
    found = project(spec, toy)
    assert nominal(found) == pytest.approx(3 * (FORWARD + BACKWARD) + UPDATE)
    ends = [float(end[0]) for end in found.track.ends]
    window = slice(found.pipeline.filled - 1, found.pipeline.filled + found.pipeline.timed)
    assert np.diff(ends[window]).mean() < nominal(found) * 0.995  # what the last stage alone would say
    run = [float(end[0]) for end in project(spec, toy, as_run=True).track.ends]
    assert nominal(found) == pytest.approx((run[390] - run[200]) / 190)


def test_drained_segments_cost_time():
    whole = nominal(project(settings("pipedream", 4), Toy()))
    drained = nominal(project(settings("pipedream", 4, drain_every=8), Toy()))
    assert drained > whole * 1.1


def test_more_bandwidth_is_never_slower_and_none_left_is_exposed():
    spec = settings("1f1b-flush", 4, batch=4)
    times = [nominal(project(spec, Toy(bandwidth=message(spec) / c))) for c in (4.0, 1.0, 0.25, 0.0625)]
    assert all(a > b for a, b in pairwise(times))
    free = project(spec, Toy())
    assert free.exposed_s[0] == 0
    assert project(spec, Toy(bandwidth=message(spec))).exposed_s[0] > 0


def test_messages_between_nodes_take_the_other_link():
    spec = settings("gpipe", 3, batch=1, microbatches=1)
    slow = message(spec) / 0.1
    near, far = project(spec, Toy(bandwidth=slow)), project(spec, Toy(bandwidth=slow, devices_per_node=2))
    assert nominal(far) - nominal(near) == pytest.approx(2 * 0.9)


def test_the_trace_has_every_slot_that_takes_time():
    found = project(settings("pipedream", 2), Toy(bandwidth=1e6))
    events = [e for e in json.loads(found.track.trace())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == sum(float(s.end[0]) > float(s.start[0]) for s in found.track.slots)
    assert {e["tid"] for e in events} == {"compute", *SEND.values()}


@pytest.mark.parametrize(("method", "microbatches"), [("pipedream", 1), ("gpipe", 2)])
def test_the_norm_is_a_part_of_the_update(method, microbatches):
    spec = settings(method, 2, batch=microbatches, microbatches=microbatches)
    plain, found = project(spec, Toy()), project(spec, Toy(norm_s=0.75))
    assert nominal(found) - nominal(plain) == pytest.approx(0.75)
    assert found.norm_share == pytest.approx(0.75 / found.update_s)
    assert plain.norm_share.max() == 0
    assert {slot.phase for slot in found.track.slots if slot.action.kind == "U"} == {"grad_norm", "optimizer_step"}
    assert found.track.most("optimizer_step")[0] == pytest.approx(UPDATE)
    assert found.track.most("nothing of that name").max() == 0


RUNS = [("1f1b-flush", {}), ("pipedream-2bw", {}), ("pipedream", {}), ("basis-rotation", {"period": 10})]


@pytest.mark.parametrize(("method", "own"), RUNS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_measured_run_without_its_first_updates_is_a_full_pipeline(method, own):
    """The runs of pipeline_time, in proportion to a data sheet: why a comparison with them projects a full pipeline."""
    stages = {"model": "qwen3-small", "sequence": 128, "steps": 24, "stages": 4}
    spec = PipelineSpec(method=method, method_settings=own, **stages)  # type: ignore[arg-type]
    machine = Roofline(hardware.load("h100x8"))
    full_pipeline, as_run = project(spec, machine), project(spec, machine, as_run=True)
    assert as_run.update_s == pytest.approx(full_pipeline.update_s, rel=1e-3)
    # negative control: a run in which the last stage works off what piled up before it is not
    piled = settings("pipedream", 4, layers=9, layer_counts=(3, 2, 2, 2), steps=24)
    toy = Toy(head_s=0.96 * (FORWARD + BACKWARD) / 2)
    assert nominal(project(piled, toy, as_run=True)) < 0.999 * nominal(project(piled, toy))


def test_evidence_is_shared_out_by_time():
    spec = settings("gpipe", 2, batch=1, microbatches=1)
    c = 0.5
    found = project(spec, Toy(bandwidth=message(spec) / c))
    work = 2 * (FORWARD + BACKWARD + UPDATE)
    assert found.evidence == {
        "toy": pytest.approx(work / (work + 2 * c)),
        "toy link": pytest.approx(2 * c / (work + 2 * c)),
    }
    assert np.isfinite(found.samples_per_s).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "weight-prediction"}, "predict"),
        ({"replicas": 2, "batch": 2}, "one replica"),
        ({"sequence": 10**6}, "positions"),
    ],
)
def test_what_is_not_modelled_is_refused(change, words):
    spec = settings("pipedream", 2).model_copy(update=change)
    with pytest.raises(ConfigError, match=words):
        full(spec, "float32")
    with pytest.raises(ConfigError, match="float16"):
        full(settings("pipedream", 2), "float16")
