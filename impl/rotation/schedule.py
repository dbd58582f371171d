"""Pipeline schedules as data: what each stage does in which order, and with which version of its weights.

A version of a stage's weights is the number of updates that they have seen.  Nothing about delays is typed in: the
version of every forward, backward and update follows from the order of a stage's actions, and staleness from the
versions.  Simulator, runtime and projection consume the same object.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["F", "B", "U"]
Mode = Literal["stash", "no-stash-recompute", "2bw", "vertical-sync", "sync"]


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
