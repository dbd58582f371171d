"""When every rank of a mesh computes, communicates and waits.

A timeline is filled in program order, for all ranks and all draws of the inputs at once: times are arrays
``[1 + DRAWS, *mesh]`` in which an axis of length 1 stands for ranks that do the same.  Every rank has a compute stream
and one stream per communicator; a stream does one thing at a time, in the order in which it was given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from impl.projection.trace import Span, chrome
from impl.projection.uncertain import DRAWS, Cost, Samples, shares

Array = NDArray[np.float64]
COMPUTE = "compute"
SLOWER = "waiting for slower ranks"
"""Evidence of idle time."""


@dataclass(frozen=True)
class Op:
    """Something that ranks do on one of their streams.

    start, end: seconds ``[1 + DRAWS, *mesh]``.
    bytes: logical bytes that every rank moves ``[*mesh]``, counted like :class:`impl.canzona.collectives.Ledger`, under
        ``dimension`` (``dp``, ``tp``, ``world`` or ``pp``); 0 for compute.
    waiting: the stream only waits for another one.  idle: because other ranks are not there yet, so that it is no
        communication that is exposed.
    ready: when each rank itself could have begun; :attr:`start` is later where it has to meet a slower one.
    """

    name: str
    stream: str
    phase: str
    start: Array
    end: Array
    evidence: dict[str, float]
    bytes: Array
    dimension: str = ""
    waiting: bool = False
    idle: bool = False
    ready: Array | None = None

    @property
    def seconds(self) -> Array:
        """How long it takes ``[1 + DRAWS, *mesh]``."""
        return self.end - self.start


@dataclass
class Timeline:
    """The operations of a mesh of ranks.

    mesh: number of ranks along each axis, for example ``(dp, tp)``.
    shared: communication runs on the cores that compute (a CPU), so that it hides nothing: all streams are one.
    """

    mesh: tuple[int, ...]
    shared: bool = False
    ops: list[Op] = field(default_factory=list)
    _free: dict[str, Array] = field(default_factory=dict)
    _met: dict[str, list[Op]] = field(default_factory=dict)

    def stream(self, name: str) -> str:
        """Return the stream on which ``name`` really runs."""
        return COMPUTE if self.shared else name

    def free(self, stream: str) -> Array:
        """Return when ``stream`` has done everything that it was given."""
        return self._free.get(self.stream(stream), self._array(np.zeros(1 + DRAWS)))

    def add(
        self,
        stream: str,
        name: str,
        phase: str,
        cost: Cost | Array,
        *,
        after: Iterable[Op] = (),
        meet: Sequence[int] = (),
        bytes: Any = 0.0,
        dimension: str = "",
        evidence: dict[str, float] | None = None,
    ) -> Op:
        """Append an operation to ``stream`` and return it.

        cost: the same on every rank, or seconds ``[1 + DRAWS, *mesh]`` (then with ``evidence``).
        after: it starts when these have ended too.
        meet: axes of ``mesh`` (from 0) along which it starts when the last rank is ready, as a collective does.
        """
        seconds = self._array(cost.seconds) if isinstance(cost, Cost) else cost
        known = cost.evidence if isinstance(cost, Cost) else evidence or {}
        start = ready = self._ready(stream, after)
        if axes := tuple(axis + 1 for axis in meet):
            start = start.max(axis=axes, keepdims=True)
        sent, on = np.asarray(bytes, dtype=float), self.stream(stream)
        op = Op(name, on, phase, start, start + seconds, known, sent, dimension, ready=ready)
        if on != COMPUTE and start.shape != ready.shape:
            self._met.setdefault(on, []).append(op)
        return self._append(op)

    def wait(self, ops: Iterable[Op], phase: str) -> Op | None:
        """Let the compute stream wait for ``ops``, as ``phase``; return the wait, None where all are on that stream.

        Where collectives could not begin because other ranks were late, that part of the wait comes first and is
        ``idle``.
        """
        due = [op for op in ops if op.stream != COMPUTE]
        if not due:
            return None
        start, end = self.free(COMPUTE), self._ready(COMPUTE, due)
        late = self._late({op.stream for op in due}, start, end)
        if late.any():
            op = Op("wait for slower ranks", COMPUTE, phase, start, start + late, {SLOWER: 1.0}, np.zeros(()))
            start = self._append(replace(op, waiting=True, idle=True)).end
        known = shares([(op.evidence, float(op.seconds[0].max())) for op in due])
        names = due[0].name if len(due) == 1 else f"{due[0].name} and {len(due) - 1} more"
        return self._append(Op(f"wait for {names}", COMPUTE, phase, start, end, known, np.zeros(()), waiting=True))

    def end(self) -> Samples:
        """Return when the last rank has done everything ``[1 + DRAWS]``."""
        return np.max([np.zeros(1 + DRAWS), *(_slowest(free) for free in self._free.values())], axis=0)

    def seconds(self, *phases: str, waiting: bool | None = None) -> Samples:
        """Return the time that the slowest rank's compute stream spends in ``phases`` (all if empty) ``[1 + DRAWS]``.

        waiting: only waiting, or only working; None for both.
        """
        return slowest([op for op in self._compute(phases) if waiting is None or op.waiting is waiting])

    def evidence(self, *phases: str) -> dict[str, float]:
        """Return the share of time by source in what :meth:`seconds` returns, of the rank that is slowest nominally."""
        return sources(self._compute(phases))

    def bytes(self) -> dict[str, dict[str, float]]:
        """Return the logical bytes of the busiest rank by phase and dimension."""
        sums: dict[tuple[str, str], Array] = defaultdict(lambda: np.zeros(self.mesh))
        for op in self.ops:
            if op.dimension:
                sums[op.phase, op.dimension] = sums[op.phase, op.dimension] + op.bytes
        out: dict[str, dict[str, float]] = defaultdict(dict)
        for (phase, dimension), count in sums.items():
            out[phase][dimension] = float(count.max())
        return dict(out)

    def trace(self, names: Sequence[str] | None = None, ranks: Sequence[tuple[int, ...]] | None = None) -> str:
        """Return the nominal timeline as a Chrome trace (JSON), which Perfetto and ``chrome://tracing`` open.

        ranks: which to show; all of them, the mesh's last axis first, if not given.  names: of those, in their order.
        """
        shown = list(np.ndindex(*self.mesh)) if ranks is None else list(ranks)
        spans: list[Span] = []
        for op in self.ops:
            start, seconds = (np.broadcast_to(a[0], self.mesh) for a in (op.start, op.seconds))
            notes = {"evidence": list(op.evidence)}
            for number, rank in enumerate(shown):
                times = float(start[rank]), float(seconds[rank])
                spans.append(Span(number, op.stream, op.name, op.phase, *times, notes))
        return chrome(names or [f"rank {', '.join(map(str, rank))}" for rank in shown], spans)

    def _compute(self, phases: Sequence[str]) -> list[Op]:
        return [op for op in self.ops if op.stream == COMPUTE and (not phases or op.phase in phases)]

    def _late(self, streams: Iterable[str], start: Array, end: Array) -> Array:
        """Return how long between ``start`` and ``end`` collectives waited for their last rank."""
        late = np.zeros_like(end)
        for stream in streams:
            met = self._met.get(stream, [])
            for op in met:
                assert op.ready is not None, "of a meeting"
                late = late + np.clip(np.minimum(op.start, end) - np.maximum(op.ready, start), 0.0, None)
            self._met[stream] = [op for op in met if (op.start > end).any()]
        return np.minimum(late, end - start)

    def _ready(self, stream: str, after: Iterable[Op]) -> Array:
        ready = self.free(stream)
        for op in after:
            ready = np.maximum(ready, op.end)
        return ready

    def _append(self, op: Op) -> Op:
        self.ops.append(op)
        self._free[op.stream] = op.end
        return op

    def _array(self, samples: Samples) -> Array:
        return samples.reshape(-1, *(1 for _ in self.mesh))


def slowest(ops: Sequence[Op]) -> Samples:
    """Return the largest sum of seconds over ``ops`` that a rank has ``[1 + DRAWS]``."""
    return _slowest(_sum(ops)) if ops else np.zeros(1 + DRAWS)


def sources(ops: Sequence[Op]) -> dict[str, float]:
    """Return the share of time by source in :func:`slowest`, of the rank that is slowest nominally."""
    if not ops:
        return {}
    times = _sum(ops)[0]
    rank = np.unravel_index(int(times.argmax()), times.shape)
    return shares([(op.evidence, float(np.broadcast_to(op.seconds[0], times.shape)[rank])) for op in ops])


def _sum(ops: Sequence[Op]) -> Array:
    total = ops[0].seconds
    for op in ops[1:]:
        total = total + op.seconds
    return total


def _slowest(times: Array) -> Samples:
    return times.reshape(len(times), -1).max(axis=1)
