"""The timeline: streams that never do two things at once, collectives that meet, waits that show what is exposed."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from impl.projection.timeline import COMPUTE, Op, Timeline, slowest, sources
from impl.projection.uncertain import DRAWS, Cost, exact

MESH = (2, 3)


def cost(seconds: float, source: str = "s") -> Cost:
    return Cost.of(exact(seconds), source)


def each(rows: list[list[float]]) -> np.ndarray:
    """Return seconds ``[1 + DRAWS, 2, 3]`` from those of each rank."""
    return np.broadcast_to(np.array(rows, dtype=float), (1 + DRAWS, *MESH)).copy()


def whole(times: np.ndarray) -> np.ndarray:
    return np.broadcast_to(times, (1 + DRAWS, *MESH))


def overlaps(timeline: Timeline) -> list[str]:
    """Return the streams on which an operation starts before the one before it has ended, on any rank."""
    found = []
    for stream in {op.stream for op in timeline.ops}:
        ops = [op for op in timeline.ops if op.stream == stream]
        if any((whole(b.start) < whole(a.end) - 1e-12).any() for a, b in pairwise(ops)):
            found.append(stream)
    return found


def test_a_stream_does_one_thing_after_the_other_and_two_streams_overlap() -> None:
    timeline = Timeline(MESH)
    first = timeline.add(COMPUTE, "a", "forward", cost(2))
    sent = timeline.add("dp", "b", "grad_reduce", cost(5), after=[first])
    second = timeline.add(COMPUTE, "c", "backward", cost(3))
    assert (second.start[0] == 2).all()
    assert (sent.start[0] == 2).all()
    assert timeline.end()[0] == 7
    assert overlaps(timeline) == []


def test_shared_streams_are_one() -> None:
    timeline = Timeline(MESH, shared=True)
    first = timeline.add(COMPUTE, "a", "forward", cost(2))
    sent = timeline.add("dp", "b", "grad_reduce", cost(5), after=[first], dimension="dp", bytes=7)
    timeline.add(COMPUTE, "c", "backward", cost(3))
    assert timeline.wait([sent], "grad_reduce") is None
    assert timeline.end()[0] == 10
    assert timeline.seconds("grad_reduce")[0] == 5
    assert timeline.bytes() == {"grad_reduce": {"dp": 7.0}}


def test_collectives_meet_along_their_axes_only() -> None:
    timeline = Timeline(MESH)
    timeline.add(COMPUTE, "a", "forward", each([[1, 2, 3], [4, 5, 6]]), evidence={})
    now = timeline.ops[-1]
    along = timeline.add("tp", "t", "forward", cost(1), after=[now], meet=[1])
    assert whole(along.start)[0].tolist() == [[3, 3, 3], [6, 6, 6]]
    across = timeline.add("dp", "d", "forward", cost(1), after=[now], meet=[0])
    assert whole(across.start)[0].tolist() == [[4, 5, 6], [4, 5, 6]]
    everywhere = timeline.add("world", "w", "forward", cost(1), after=[now], meet=[0, 1])
    assert (whole(everywhere.start)[0] == 6).all()


def test_a_wait_is_exactly_the_gap() -> None:
    timeline = Timeline(MESH)
    begin = timeline.add(COMPUTE, "a", "forward", cost(1))
    sent = timeline.add("dp", "b", "grad_reduce", cost(4, "link"), after=[begin])
    timeline.add(COMPUTE, "c", "backward", each([[1, 2, 3], [4, 5, 6]]), evidence={"own": 1.0})
    waited = timeline.wait([sent], "grad_reduce")
    assert waited is not None
    assert whole(waited.seconds)[0].tolist() == [[3, 2, 1], [0, 0, 0]]
    assert waited.waiting
    assert waited.evidence == {"link": 1.0}
    assert timeline.seconds("grad_reduce", waiting=True)[0] == 3
    assert timeline.seconds("grad_reduce", waiting=False).max() == 0
    assert timeline.seconds("backward")[0] == 6
    assert timeline.seconds()[0] == 7
    assert timeline.end()[0] == 7


def test_evidence_is_that_of_the_slowest_rank() -> None:
    timeline = Timeline(MESH)
    timeline.add(COMPUTE, "busy on one rank", "x", each([[0, 0, 0], [0, 0, 9]]), evidence={"rare": 1.0})
    timeline.add(COMPUTE, "busy on another", "x", each([[8, 0, 0], [0, 0, 1]]), evidence={"common": 1.0})
    assert timeline.seconds("x")[0] == 10
    assert timeline.evidence("x") == {"rare": 0.9, "common": 0.1}
    assert sources([]) == {}
    assert slowest([]).max() == 0


def test_bytes_are_those_of_the_busiest_rank_and_compute_has_none() -> None:
    timeline = Timeline(MESH)
    timeline.add(COMPUTE, "a", "x", cost(1), bytes=99)
    timeline.add("dp", "b", "x", cost(1), bytes=np.array([[1.0], [5.0]]), dimension="dp")
    timeline.add("tp", "c", "x", cost(1), bytes=np.array([[1.0, 2.0, 3.0]]), dimension="tp")
    timeline.add("dp", "d", "x", cost(1), bytes=np.array([[7.0], [0.0]]), dimension="dp")
    assert timeline.bytes() == {"x": {"dp": 8.0, "tp": 3.0}}


def test_the_trace_is_json_that_says_the_same() -> None:
    timeline = Timeline(MESH)
    timeline.add(COMPUTE, "a", "forward", each([[1, 0, 0], [0, 0, 0.5]]), evidence={"s": 1.0})
    found = json.loads(timeline.trace())
    spans = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert [(s["pid"], s["ts"], s["dur"], s["name"], s["cat"]) for s in spans] == [
        (0, 0.0, 1e6, "a", "forward"),
        (5, 0.0, 5e5, "a", "forward"),
    ]
    names = [event["args"]["name"] for event in found["traceEvents"] if event["ph"] == "M"]
    assert names[5] == "rank 1, 2"
    chosen = json.loads(timeline.trace(["last"], ranks=[(1, 2)]))["traceEvents"]
    assert [(e["ph"], e["pid"]) for e in chosen] == [("M", 0), ("X", 0)]
    assert chosen[0]["args"]["name"] == "last"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["compute", "uneven", "dp", "tp", "world", "wait"]),
        st.floats(0, 5),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=25,
)


def program(steps: list[tuple[str, float, int]], *, shared: bool = False) -> Timeline:
    """Run a random program: compute, collectives after the last compute, waits for the n-th last collective."""
    timeline = Timeline(MESH, shared=shared)
    sent: list[Op] = []
    now: list[Op] = []
    for kind, seconds, number in steps:
        if kind == "compute":
            now = [timeline.add(COMPUTE, "c", "work", cost(seconds))]
        elif kind == "uneven":
            rows = [[seconds, 0, 1], [number, seconds, 2]]
            now = [timeline.add(COMPUTE, "u", "work", each(rows), evidence={"u": 1.0})]
        elif kind == "wait":
            waited = timeline.wait(sent[-number - 1 :][:1], "waits")
            now = [waited] if waited else now
        else:
            meet = {"dp": [0], "tp": [1], "world": [0, 1]}[kind]
            sent.append(timeline.add(kind, kind, "talk", cost(seconds), after=now, meet=meet, dimension=kind, bytes=1))
    return timeline


@given(STEPS)
@settings(max_examples=150, deadline=None)
def test_random_programs_never_overlap_and_never_wait_longer_than_needed(steps: list[tuple[str, float, int]]) -> None:
    timeline = program(steps)
    assert overlaps(timeline) == []
    for op in timeline.ops:
        assert (op.seconds >= -1e-12).all()
    work = timeline.seconds(waiting=False)
    assert (timeline.end() >= work - 1e-9).all()
    assert (timeline.seconds() <= timeline.end() + 1e-9).all()
    serial = program(steps, shared=True)
    assert (serial.end() >= timeline.end() - 1e-9).all(), "overlap never costs time"
    json.loads(timeline.trace())


@given(STEPS, st.integers(0, 24))
@settings(max_examples=100, deadline=None)
def test_longer_work_never_ends_earlier(steps: list[tuple[str, float, int]], place: int) -> None:
    place %= len(steps)
    kind, seconds, number = steps[place]
    longer = [*steps[:place], (kind, seconds + 1, number), *steps[place + 1 :]]
    assert (program(longer).end() >= program(steps).end() - 1e-9).all()


def test_negative_control_an_overlap_is_seen() -> None:
    timeline = program([("compute", 2.0, 0), ("compute", 2.0, 0)])
    timeline.ops[1] = Op("c", COMPUTE, "work", np.ones((1, 1, 1)), np.ones((1, 1, 1)) * 3, {}, np.zeros(()))
    assert overlaps(timeline) == [COMPUTE]


@pytest.mark.parametrize("shared", [False, True])
def test_draws_do_not_mix(shared: bool) -> None:
    """Every draw is a timeline of its own: one that is slow changes no other."""
    slow = exact(1.0)
    slow[5] = 100.0
    timeline = Timeline(MESH, shared=shared)
    now = timeline.add(COMPUTE, "a", "x", Cost.of(slow, "s"))
    sent = timeline.add("dp", "b", "x", cost(1), after=[now], meet=[0])
    timeline.wait([sent], "x")
    assert timeline.end()[5] == 101
    assert np.allclose(np.delete(timeline.end(), 5), 2)
