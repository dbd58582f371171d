"""Which lines of a pipeline experiment are in bold: those that a test shows to be the best at their P."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paper_figures import statistics

if TYPE_CHECKING:
    from paper_figures.pipelines import Line


def fewest(found: Sequence[Line], target: float) -> list[Line]:
    """Return the lines that need clearly the fewest iterations to ``target`` of all with as many stages.

    By :func:`statistics.smallest` on logarithms; a seed that does not reach the target counts with all its updates, the
    least that it needs.  None of a number of stages where a seed of any line is not done.
    """
    clear = []
    for here in _same_stages(found):
        if math.isfinite(target) and all(line.complete for line in here):
            by_seed = [line.iterations(target) for line in here]
            logs = [
                {seed: math.log(max(line.steps if v is None else v, 1.0)) for seed, v in own.items()}
                for line, own in zip(here, by_seed, strict=True)
            ]
            best = statistics.smallest(logs)
            clear += [here[best]] if best is not None and None not in by_seed[best].values() else []
    return clear


def lowest(found: Sequence[Line]) -> list[Line]:
    """Return the lines whose final held-out loss is clearly the lowest of all with as many stages.

    By :func:`statistics.smallest`; none of a number of stages where a seed of any line is not done.
    """
    clear = []
    for here in _same_stages(found):
        best = statistics.smallest([line.finals for line in here]) if all(line.complete for line in here) else None
        clear += [here[best]] if best is not None else []
    return clear


def _same_stages(found: Sequence[Line]) -> list[list[Line]]:
    return [[line for line in found if line.stages == p] for p in dict.fromkeys(line.stages for line in found)]
