"""The rules that make schedules: 1F1B without flush, GPipe, 1F1B with flush."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from impl.errors import ConfigError, unknown
from impl.rotation.schedule import Action, Kind, Mode, Schedule, validate

ASYNCHRONOUS: tuple[Mode, ...] = ("stash", "no-stash-recompute", "2bw", "vertical-sync")
"""Modes of :func:`asynchronous`."""
Order = list[tuple[Kind, int]]


def asynchronous(stages: int, updates: int | Sequence[int], mode: Mode = "stash", per_update: int = 1) -> Schedule:
    """Return 1F1B without flush: every stage updates as soon as its gradient is there.

    Stage k runs ``stages - 1 - k`` forwards ahead of its backwards, so that is how many updates pass between forward
    and update of a microbatch (``per_update`` of 1).  The pipeline drains only at the end.

    updates: a number, or one for each of several segments; it drains at the end of each, and delays begin anew.
    mode: ``stash``: backward on the version of its forward.  ``no-stash-recompute``: forward the same, backward on the
        newest.  ``vertical-sync``: both on the newest version of stage 0 at its forward, on every stage.  ``2bw``: the
        same, taken once for all ``per_update >= stages`` microbatches of an update, so two versions are enough.

    Raises :class:`ConfigError` for numbers that make no pipeline.
    """
    segments = _segments(stages, updates, per_update)
    if mode not in ASYNCHRONOUS:
        raise unknown("mode", mode, ASYNCHRONOUS)
    if mode == "2bw" and per_update < stages:
        raise ConfigError(
            f"mode 2bw needs at least as many microbatches in an update as there are stages: {per_update} < {stages}"
        )
    orders: list[Order] = []
    for stage in range(stages):
        flow = _join(_one_f_one_b(stages - 1 - stage, n * per_update) for n in segments)
        orders.append(_with_updates(flow, per_update))
    return _schedule("1f1b-async", mode, per_update, orders)


def gpipe(stages: int, microbatches: int, updates: int | Sequence[int]) -> Schedule:
    """Return GPipe: all forwards of an update, then all of its backwards, then the update; one version for all."""
    segments = _segments(stages, updates, microbatches)
    forwards: Order = [("F", i) for i in range(microbatches)]
    backwards: Order = [("B", i) for i in range(microbatches)]
    flow = _with_updates(_join(forwards + backwards for _ in range(sum(segments))), microbatches)
    return _schedule("gpipe", "sync", microbatches, [flow] * stages)


def one_f_one_b_flush(stages: int, microbatches: int, updates: int | Sequence[int]) -> Schedule:
    """Return 1F1B that drains before every update (PipeDream-Flush): GPipe's result with fewer activations alive."""
    segments = _segments(stages, updates, microbatches)
    orders = [
        _with_updates(_join(_one_f_one_b(stages - 1 - stage, microbatches) for _ in range(sum(segments))), microbatches)
        for stage in range(stages)
    ]
    return _schedule("1f1b-flush", "sync", microbatches, orders)


def two_bw(stages: int, microbatches: int, updates: int | Sequence[int]) -> Schedule:
    """Return PipeDream-2BW: :func:`asynchronous` in mode ``2bw``, ``microbatches >= stages`` in every update."""
    return asynchronous(stages, updates, "2bw", microbatches)


_SYNCHRONOUS: dict[str, Callable[[int, int, int | Sequence[int]], Schedule]] = {
    "gpipe": gpipe,
    "1f1b-flush": one_f_one_b_flush,
}
NAMES = ("1f1b-async", *_SYNCHRONOUS)


def build(
    name: str, stages: int, updates: int | Sequence[int], *, mode: Mode | None = None, per_update: int = 1
) -> Schedule:
    """Return the validated schedule ``name``; ``mode`` belongs to ``1f1b-async`` only (default ``stash``).

    Raises :class:`ConfigError` for unknown names and modes and for numbers that make no pipeline.
    """
    if name == "1f1b-async":
        schedule = asynchronous(stages, updates, mode or "stash", per_update)
    elif name in _SYNCHRONOUS:
        if mode not in (None, "sync"):
            raise ConfigError(f"mode {mode} applies to 1f1b-async; {name} has no stale weights")
        schedule = _SYNCHRONOUS[name](stages, per_update, updates)
    else:
        raise unknown("schedule", name, NAMES)
    validate(schedule)
    return schedule


def _segments(stages: int, updates: int | Sequence[int], per_update: int) -> tuple[int, ...]:
    segments = (updates,) if isinstance(updates, int) else tuple(updates)
    for what, number in (("stages", stages), ("microbatches in an update", per_update), ("segments", len(segments))):
        if number < 1:
            raise ConfigError(f"a pipeline needs at least 1 of {what}, not {number}")
    if min(segments) < 1:
        raise ConfigError(f"a segment needs at least 1 update, not {min(segments)}")
    return segments


def _one_f_one_b(ahead: int, microbatches: int) -> Order:
    """Return the order of a stage that runs ``ahead`` forwards before its first backward, then drains."""
    warm = min(ahead, microbatches)
    order: Order = [("F", j) for j in range(warm)]
    for i in range(microbatches - warm):
        order.extend((("F", warm + i), ("B", i)))
    order.extend(("B", i) for i in range(microbatches - warm, microbatches))
    return order


def _join(orders: Iterator[Order]) -> Order:
    """Return ``orders`` one after the other, microbatches numbered through."""
    parts = list(orders)
    starts = accumulate((sum(kind == "F" for kind, _ in part) for part in parts), initial=0)
    return [(kind, start + number) for part, start in zip(parts, starts, strict=False) for kind, number in part]


def _with_updates(order: Order, per_update: int) -> Order:
    """Return ``order`` with an update right after the last backward that it needs."""
    out: Order = []
    for kind, number in order:
        out.append((kind, number))
        if kind == "B" and (number + 1) % per_update == 0:
            out.append(("U", number // per_update))
    return out


def _schedule(name: str, mode: Mode, per_update: int, orders: Sequence[Order]) -> Schedule:
    """Return the schedule of these orders, with the versions that follow from them."""
    first = _newest_at_forward(orders[0])
    shared = mode in ("2bw", "vertical-sync")
    stages = []
    for order in orders:
        own = _newest_at_forward(order)
        actions, newest = [], 0
        for kind, number in order:
            if kind == "U":
                actions.append(Action("U", number, newest))
                newest += 1
                continue
            if mode == "2bw":
                version = first[number // per_update * per_update]
            else:
                version = first[number] if shared else own[number]
            if kind == "B" and mode == "no-stash-recompute":
                version = newest
            actions.append(Action(kind, number, version))
        stages.append(tuple(actions))
    return Schedule(name, mode, len(orders), per_update, tuple(stages))


def _newest_at_forward(order: Order) -> dict[int, int]:
    """Return for each microbatch how many updates its stage has done when it runs the forward."""
    newest, out = 0, {}
    for kind, number in order:
        if kind == "U":
            newest += 1
        elif kind == "F":
            out[number] = newest
    return out
