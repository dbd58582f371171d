"""Pipeline schedules as data: what each stage does in which order, and with which version of its weights.

A version of a stage's weights is the number of updates that they have seen.  Nothing about delays is typed in: the
version of every forward, backward and update follows from the order of a stage's actions, and staleness from the
versions.  Simulator, runtime and projection consume the same object.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal

from impl.errors import ConfigError, unknown

Kind = Literal["F", "B", "U"]
Mode = Literal["stash", "no-stash-recompute", "2bw", "vertical-sync", "sync"]
ASYNCHRONOUS: tuple[Mode, ...] = ("stash", "no-stash-recompute", "2bw", "vertical-sync")
"""Modes of :func:`asynchronous`."""
Order = list[tuple[Kind, int]]


@dataclass(frozen=True)
class Action:
    """One action of one stage.

    kind: forward or backward of a microbatch, or an update.
    number: of the microbatch (F, B) or of the update (U), from 0 in the whole schedule.
    version: of the weights that F or B runs on; of those that U changes into ``version + 1``.
    """

    kind: Kind
    number: int
    version: int


@dataclass(frozen=True)
class Schedule:
    """What ``stages`` stages do, each a list of actions in order.

    name: of the rule that made it; mode: which weights forward and backward see.
    per_update: microbatches whose gradients are averaged into one update.
    """

    name: str
    mode: Mode
    stages: int
    per_update: int
    actions: tuple[tuple[Action, ...], ...]

    @cached_property
    def updates(self) -> int:
        """Updates of every stage."""
        return sum(action.kind == "U" for action in self.actions[0])

    @property
    def microbatches(self) -> int:
        """Microbatches that pass through every stage."""
        return self.updates * self.per_update

    def update_of(self, microbatch: int) -> int:
        """Return the update that the gradient of ``microbatch`` is part of."""
        return microbatch // self.per_update

    def ends_update(self, microbatch: int) -> bool:
        """Return whether ``microbatch`` is the last one of its update."""
        return (microbatch + 1) % self.per_update == 0


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


def staleness(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage the most updates between a forward and the update that uses its gradient."""
    out = []
    for actions in schedule.actions:
        forward = {a.number: a.version for a in actions if a.kind == "F"}
        out.append(max((schedule.update_of(j) - version for j, version in forward.items()), default=0))
    return tuple(out)


def peak_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return for each stage the most versions that must exist at one time, the newest included."""
    return tuple(_peak(actions) for actions in schedule.actions)


def uses(actions: Sequence[Action]) -> Counter[int]:
    """Return how many forwards and backwards run on each version."""
    return Counter(action.version for action in actions if action.kind != "U")


def in_order(schedule: Schedule, done: Sequence[int] = ()) -> Iterator[tuple[int, Action]]:
    """Yield every stage's actions in one order that respects what they wait for: ``(stage, action)``.

    A forward waits for the same forward of the stage before, a backward for that of the stage after.  All stages
    finish update u before any begins update u + 1, so that after it their newest versions are equal.

    done: how many actions of each stage to leave out, where all stages have just done the same update.

    Raises ``ValueError`` if the schedule cannot be executed.
    """
    place = list(done) or [0] * schedule.stages
    passed = {(k, a.kind, a.number) for k, n in enumerate(place) for a in schedule.actions[k][:n]}
    last = schedule.stages - 1
    for update in range(sum(kind == "U" for stage, kind, _ in passed if stage == 0), schedule.updates):
        behind = set(range(schedule.stages))
        while behind:
            moved = False
            for stage in sorted(behind):
                actions = schedule.actions[stage]
                while place[stage] < len(actions):
                    action = actions[place[stage]]
                    source = stage - 1 if action.kind == "F" else stage + 1
                    local = action.kind == "U" or not 0 <= source <= last
                    if not local and (source, action.kind, action.number) not in passed:
                        break
                    place[stage] += 1
                    passed.add((stage, action.kind, action.number))
                    moved = True
                    yield stage, action
                    if action.kind == "U" and action.number == update:
                        behind.discard(stage)
                        break
            if not moved:
                raise ValueError(f"deadlock: stages {sorted(behind)} wait for each other before update {update}")


def validate(schedule: Schedule) -> None:
    """Raise ``ValueError`` unless ``schedule`` is complete and can be executed.

    Every stage runs every forward before its backward, once; updates come in order, each after all of its backwards;
    every version exists when it is used, and a backward uses its forward's version unless the mode says otherwise.
    """
    for stage, actions in enumerate(schedule.actions):
        where, newest = f"stage {stage}", 0
        forward: dict[int, int] = {}
        backward: set[int] = set()
        for action in actions:
            if action.version > newest or (action.kind == "U" and action.version != newest):
                raise ValueError(f"{where}: {action} before version {action.version} is the newest")
            if action.kind == "F":
                if action.number in forward:
                    raise ValueError(f"{where}: {action} comes twice")
                forward[action.number] = action.version
            elif action.kind == "B":
                if action.number in backward or action.number not in forward:
                    raise ValueError(f"{where}: {action} needs one forward before it")
                expected = newest if schedule.mode == "no-stash-recompute" else forward[action.number]
                if action.version != expected:
                    raise ValueError(f"{where}: {action} should run on version {expected}")
                backward.add(action.number)
            else:
                due = range(action.number * schedule.per_update, (action.number + 1) * schedule.per_update)
                if action.number != newest or not backward.issuperset(due):
                    raise ValueError(f"{where}: {action} comes too early or out of order")
                newest += 1
        if len(forward) != len(backward) or len(forward) != schedule.microbatches or newest != schedule.updates:
            raise ValueError(f"{where}: some microbatches do not come back or are in no update")
    for _ in in_order(schedule):
        pass


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


def _peak(actions: Sequence[Action]) -> int:
    left, newest = uses(actions), 0
    alive, peak = {0}, 1
    for action in actions:
        if action.kind == "U":
            if not left[newest]:
                alive.discard(newest)
            newest += 1
            alive.add(newest)
            peak = max(peak, len(alive))
        else:
            left[action.version] -= 1
            if not left[action.version] and action.version != newest:
                alive.discard(action.version)
    return peak
