"""The state of a stage as tensors, between any two updates: drained or with microbatches in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from impl.rotation.schedule import Action, Schedule
from impl.rotation.stage import Flight, LogEntry, Stage
from impl.rotation.stash import Weights

_COPIED = ("engine/", "version/")
"""What is copied into tensors of its own when a state is taken over, from wherever it is."""


def state_dict(stage: Stage) -> dict[str, Tensor]:
    """Return what ``stage`` needs to go on from here: this rank's part, without copies.

    That is the engine's state, what the method remembers, stashed versions, and the inputs of microbatches in flight.
    Messages between stages are not part of it: see :func:`messages`.  Raises ``RuntimeError`` if the gradients of an
    update are not complete.
    """
    if next((entry.kind for entry in reversed(stage.log) if entry.kind != "F"), "U") == "B":
        raise RuntimeError("a stage can be saved only between updates, not with gradients accumulated")
    out = {f"engine/{key}": tensor for key, tensor in stage.engine.state_dict().items()}
    out |= {"position": torch.tensor(len(stage.log)), "peak": torch.tensor(stage.stash.peak)}
    out["versions"] = torch.tensor(sorted(stage.stash.versions), dtype=torch.int64)
    for family, memory in enumerate(stage.memory):
        out |= {f"memory/{family}/{key}": tensor for key, tensor in memory.items()}
    for version, copies in stage.stash.versions.items():
        out |= {f"version/{version}/{family}": tensor for family, tensor in enumerate(copies)}
    for number, flight in stage.flight.items():
        parts = {"hidden": flight.hidden, "tokens": flight.tokens, "sent": flight.sent}
        out |= {f"flight/{number}/{key}": t.detach() for key, t in parts.items() if t is not None}
        predicted = flight.weights if flight.predicted else None
        out |= {f"flight/{number}/weights/{family}": tensor for family, tensor in enumerate(predicted or ())}
    return out


def load_state_dict(stage: Stage, state: Mapping[str, Tensor]) -> None:
    """Let ``stage``, which must be fresh, go on from what :func:`state_dict` returned on an equal one.

    Raises ``RuntimeError`` if it is not fresh, ``KeyError`` if its engine does not match.
    """
    if stage.log:
        raise RuntimeError("only a fresh stage can take over a state")
    done = stage.schedule.actions[stage.index][: int(state["position"])]
    stage.log += [LogEntry(stage.index, *dataclasses.astuple(action)) for action in done]
    stage.engine.load_state_dict(_below(state, "engine"))
    stage.engine.synchronize()
    device = stage.engine.mesh.device
    state = {key: t if key.startswith(_COPIED) else t.to(device) for key, t in state.items()}
    for family, memory in enumerate(stage.memory):
        memory |= {key: tensor.clone() for key, tensor in _below(state, f"memory/{family}").items()}
    predicted = {number: _weights(state, f"flight/{number}/weights") for number in _numbers(state, "flight")}
    version_of = {action.number: action.version for action in done if action.kind == "F"}
    used = [action.version for action in done if action.kind != "U"]
    used += [version_of[number] for number, weights in predicted.items() if weights is not None]
    copies = {version: _weights(state, f"version/{version}") or () for version in state["versions"].tolist()}
    newest = sum(action.kind == "U" for action in done)
    stage.stash.restore(newest, copies, used, peak=int(state["peak"]))
    for number, weights in predicted.items():
        parts = _below(state, f"flight/{number}")
        hidden = parts["hidden"].clone().requires_grad_() if "hidden" in parts else None
        tokens, sent = parts.get("tokens"), parts.get("sent")
        stage.flight[number] = Flight(hidden, tokens, None, weights, weights is not None, sent)
        if stage.keeps_graph(number):
            stage.launch(number, hidden, tokens, version_of[number], weights)


def messages(sender: Stage) -> dict[int, Tensor]:
    """Return the hidden states that ``sender`` has put on their way and the next stage has not used.

    Both stages are at the end of the same update, where no gradients are on their way.
    """
    if sender.is_last:
        return {}
    done = done_by(sender.schedule, sender.index + 1, sender.stash.newest)
    used = {action.number for action in done if action.kind == "F"}
    return {number: sender.replay(number) for number in sorted(sender.flight) if number not in used}


def done_by(schedule: Schedule, stage: int, updates: int) -> tuple[Action, ...]:
    """Return what ``stage`` has done when it has just done its first ``updates`` updates."""
    actions = schedule.actions[stage]
    ends = [0, *(i + 1 for i, action in enumerate(actions) if action.kind == "U")]
    return actions[: ends[updates]]


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    start = f"{prefix}/"
    return {key.removeprefix(start): tensor for key, tensor in state.items() if key.startswith(start)}


def _numbers(state: Mapping[str, Tensor], prefix: str) -> list[int]:
    return sorted({int(key.partition("/")[0]) for key in _below(state, prefix)})


def _weights(state: Mapping[str, Tensor], prefix: str) -> Weights | None:
    parts = _below(state, prefix)
    return tuple(parts[str(family)] for family in range(len(parts))) if parts else None
