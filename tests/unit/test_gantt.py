"""The chart's times: the known bubbles of the known schedules, and no stage in two places at once."""

from itertools import pairwise

import pytest

from impl.rotation.gantt import bubble, draw, timeline
from impl.rotation.rules import asynchronous, build

EQUAL = {"F": 1.0, "B": 1.0, "U": 0.0}


@pytest.mark.parametrize("name", ["gpipe", "1f1b-flush"])
@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 2), (4, 8), (4, 2)])
def test_bubble_of_synchronous_schedules(name, p, m):
    schedule = build(name, p, 3, per_update=m)
    assert bubble(timeline(schedule, EQUAL)) == pytest.approx((p - 1) / (m + p - 1))


def test_bubble_of_an_asynchronous_pipeline_is_its_ends_only():
    p = 4
    for n in (10, 100):
        bars = timeline(asynchronous(p, n), EQUAL)
        assert bubble(bars) == pytest.approx((p - 1) / (n + p - 1))
    assert bubble(timeline(asynchronous(p, [50, 50]), EQUAL)) > bubble(timeline(asynchronous(p, 100), EQUAL))


def test_no_overlap_and_no_work_before_its_input():
    schedule = asynchronous(4, 9)
    bars = timeline(schedule)
    at = {(b.stage, b.action.kind, b.action.number): b for b in bars}
    for stage in range(4):
        own = sorted((b for b in bars if b.stage == stage), key=lambda b: b.start)
        assert [b.action for b in own] == list(schedule.actions[stage])
        assert all(a.end <= b.start for a, b in pairwise(own))
    for (stage, kind, number), bar in at.items():
        if kind == "F" and stage:
            assert at[stage - 1, "F", number].end <= bar.start
        if kind == "B" and stage < 3:
            assert at[stage + 1, "B", number].end <= bar.start


def test_a_figure_has_a_bar_for_every_action(tmp_path):
    schedule = asynchronous(3, 5)
    figure = draw(schedule)
    assert len(figure.axes[0].patches) == schedule.stages + sum(map(len, schedule.actions))
    assert {text.get_text() for text in figure.axes[0].texts} == set("01234")
    figure.savefig(tmp_path / "chart.png")
    assert not draw(asynchronous(2, 60)).axes[0].texts
