"""Pipeline schedules as data: what each stage does in which order, and with which version of its weights.

A version of a stage's weights is the number of updates that they have seen.  Nothing about delays is typed in: the
version of every forward, backward and update follows from the order of a stage's actions, and staleness from the
versions.  Simulator, runtime and projection consume the same object, which :mod:`impl.rotation.rules` makes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Kind = Literal["F", "B", "U"]
Mode = Literal["stash", "no-stash-recompute", "2bw", "vertical-sync", "sync"]


@dataclass(frozen=True, slots=True)  # a long run has millions
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
    for update in range(sum(a.kind == "U" for a in schedule.actions[0][: place[0]]), schedule.updates):
        behind = set(range(schedule.stages))
        while behind:
            moved = False
            for stage in sorted(behind):
                actions = schedule.actions[stage]
                while place[stage] < len(actions):
                    action = actions[place[stage]]
                    source = stage - 1 if action.kind == "F" else stage + 1
                    local = action.kind == "U" or not 0 <= source <= last
                    if not local:
                        if (source, action.kind, action.number) not in passed:
                            break
                        passed.remove((source, action.kind, action.number))  # nobody else waits for it
                    place[stage] += 1
                    if action.kind != "U":
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
