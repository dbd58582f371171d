"""Chrome traces (JSON), which Perfetto and ``chrome://tracing`` open."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)  # a long timeline has many
class Span:
    """Something that one process does on one of its streams.

    process: index into the names that :func:`chrome` is given.  start, seconds: from the timeline's begin, in seconds.
    notes: shown beside the phase when the span is selected; JSON data.
    """

    process: int
    stream: str
    name: str
    phase: str
    start: float
    seconds: float
    notes: Mapping[str, Any]


def chrome(processes: Sequence[str], spans: Iterable[Span]) -> str:
    """Return the trace of ``spans``, times in microseconds; those that take no time are left out.

    processes: what each is called, in the order in which they are shown.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
        for number, name in enumerate(processes)
    ]
    for span in spans:
        if span.seconds > 0:
            event = {"ph": "X", "name": span.name, "cat": span.phase, "pid": span.process, "tid": span.stream}
            times = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}
            events.append({**event, **times, "args": {"phase": span.phase, **span.notes}})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
