"""The best of a finished sweep."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path

import numpy as np

from impl.errors import ConfigError
from impl.harness.pipeline_experiment import Entry, PipelineExperiment, Tuned
from impl.harness.pipeline_spec import PipelineSpec
from impl.harness.tidy import read_record

Choice = tuple[str, float]
"""Entry and learning rate."""


def best(sweep: PipelineExperiment, tier: str, runs: Path) -> list[Tuned]:
    """Return the best of ``sweep`` on ``tier`` from the run folders below ``runs``, by name and number of stages.

    Entries with the same ``tuned`` compete.  The best has the smallest held-out loss after the last update, the mean
    over seeds; a choice with a run that is not done does not take part, a place
    without any is left out.  Raises :class:`ConfigError` if none is done.
    """
    places: dict[tuple[str, int, str, int | None], dict[Choice, list[float]]] = defaultdict(lambda: defaultdict(list))
    entries = {entry.id: entry for entry in sweep.methods}
    for run in sweep.runs(tier):
        spec = run.spec
        assert isinstance(spec, PipelineSpec)
        assert isinstance(run.system, Entry)
        record = read_record(runs / run.id)
        loss = record.result.get("heldout_loss") if record.status == "done" else None
        place = (run.system.tuned or run.system.id, spec.stages, spec.model, spec.layers)
        places[place][run.system.id, spec.lr].append(math.nan if loss is None else float(loss))
    found = []
    for (name, stages, model, layers), losses in places.items():
        means = {choice: float(np.mean(values)) for choice, values in losses.items() if np.isfinite(values).all()}
        if not means:
            continue
        entry, lr = min(means, key=lambda choice: means[choice])
        rates = [rate for other, rate in losses if other == entry]
        found.append(
            Tuned(
                name=name,
                stages=stages,
                lr=lr,
                model=model,
                layers=layers,
                settings=entries[entry].settings,
                heldout_loss=round(means[entry, lr], 4),
                runs=sum(len(losses[choice]) for choice in means),
                edge="smallest" if lr == min(rates) else "largest" if lr == max(rates) else None,
            )
        )
    if not found:
        raise ConfigError(f"no finished run of the sweep in {runs}: run it first")
    return found
