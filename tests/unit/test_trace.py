"""Chrome traces: the format that Perfetto reads, and that both kinds of timeline write it."""

import json

import pytest

from impl.projection.trace import Span, chrome

pytestmark = pytest.mark.timeout(60)


def test_a_trace_is_what_perfetto_reads():
    spans = [
        Span(1, "compute", "forward 0", "forward", 0.5, 0.25, {"version": 3}),
        Span(0, "dp", "gather", "param_sync", 1.0, 2.0, {}),
    ]
    found = json.loads(chrome(["rank 0", "rank 1"], spans))
    assert found["displayTimeUnit"] == "ms"
    assert found["traceEvents"] == [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "rank 1"}},
        {
            **{"ph": "X", "name": "forward 0", "cat": "forward", "pid": 1, "tid": "compute", "ts": 5e5, "dur": 2.5e5},
            "args": {"phase": "forward", "version": 3},
        },
        {
            **{"ph": "X", "name": "gather", "cat": "param_sync", "pid": 0, "tid": "dp", "ts": 1e6, "dur": 2e6},
            "args": {"phase": "param_sync"},
        },
    ]


@pytest.mark.parametrize(("seconds", "events"), [(1e-9, 2), (0.0, 1)])
def test_only_what_takes_time_is_shown(seconds, events):
    span = Span(0, "compute", "wait", "forward", 1.0, seconds, {})
    assert len(json.loads(chrome(["rank 0"], [span]))["traceEvents"]) == events
