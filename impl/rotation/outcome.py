"""What the processes of a pipeline know together at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.models import weights
from impl.models.catalogue import Part
from impl.models.hf_layout import hf_names
from impl.models.parameters import ParamSpec
from impl.rotation.links import Place
from impl.rotation.stage import Stage


def collect(stage: Stage, place: Place, parts: Sequence[Part], *, diverged: bool) -> dict[str, Any]:
    """Return on rank 0 what all stages know, elsewhere nothing; every rank must call.

    parts: of all stages.  diverged: whether a loss was not finite; weights that are not count as well.
    Under ``versions`` is what each stage of replica 0 did with which version of its weights.
    """
    finite = not diverged and stage.is_sound()
    mine = {
        "peak": stage.peak_stash_versions,
        "finite": finite,
        "log": [list(entry[1:]) for entry in stage.log],
        "skipped": stage.skipped_updates,
        "counters": stage.engine.counters(),
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    all_finite = all(other["finite"] for other in everyone)
    digest = _digest(stage, place, parts) if all_finite else None
    if dist.get_rank() != 0:
        return {}
    stages = everyone[:: place.mesh.dp]
    return {
        "diverged": not all_finite,
        "params_digest": digest,
        "peak_stash_versions": [stage["peak"] for stage in stages],
        "skipped_updates": [stage["skipped"] for stage in stages],
        "counters": added([stage["counters"] for stage in stages]),
        "versions": [stage["log"] for stage in stages],
    }


def added(counters: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums over stages of what the optimizers counted."""
    return {name: sum(stage.get(name, 0) for stage in counters) for stage in counters for name in stage}


def _digest(stage: Stage, place: Place, parts: Sequence[Part]) -> str | None:
    """Return on rank 0 the digest of the newest weights of all stages."""
    stage.bind_newest()
    own = weights.whole_parameters(stage.model, stage.config, place.mesh.tp_group, stage.part)
    if dist.get_rank() == 0:
        return weights.params_digest(stage.config, _gathered(own, stage, place, parts))
    if place.replica == 0:
        for _, tensor in own:
            dist.send(tensor.contiguous(), 0)
    return None


def _gathered(
    own: Iterator[tuple[ParamSpec, Tensor]], stage: Stage, place: Place, parts: Sequence[Part]
) -> Iterator[tuple[ParamSpec, Tensor]]:
    yield from own
    for k, part in enumerate(parts[1:], start=1):
        for parameter in sorted(stage.config.parameters(1, part), key=lambda p: min(hf_names(p))):  # as they are sent
            tensor = torch.empty(parameter.shape, device=place.mesh.device)
            dist.recv(tensor, k * place.mesh.dp)
            yield parameter, tensor
