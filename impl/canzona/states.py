"""The optimizer state of one rank: on its device all the time, or in host memory between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from impl.models.parameters import ParamSpec
from impl.optimizers.base import State


class StateStore(Mapping[str, State]):
    """State of everything that a rank updates, by name.

    With ``offload`` it rests in host memory (pinned where the device is a GPU).  A step walks it in batches
    (:meth:`visit`): the next batch is on its way while one is computed with, and what has been computed goes back.  On
    a CPU the same code makes plain copies.
    """

    def __init__(self, device: torch.device, *, offload: bool = False) -> None:
        self._device, self.offload = device, offload
        self._states: dict[str, State] = {}
        self._stream = torch.cuda.Stream(device) if offload and device.type == "cuda" else None

    def __getitem__(self, name: str) -> State:
        return self._states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def add(self, name: str, state: State) -> None:
        """Take in a fresh state."""
        self._states[name] = {key: self._rest(tensor) for key, tensor in state.items()} if self.offload else state

    def visit(self, batches: Sequence[Sequence[str]]) -> Visit:
        """Return a walk through ``batches`` of names in their order."""
        return Visit(self, batches)

    def settle(self) -> None:
        """Wait until everything that was changed is back: call it before reading the states from outside a walk."""
        if self._stream is not None:
            self._stream.synchronize()

    def bytes(self) -> int:
        """Return the bytes of all states, wherever they rest."""
        return sum(t.numel() * t.element_size() for state in self._states.values() for t in state.values())

    def _rest(self, tensor: Tensor) -> Tensor:
        out = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._stream is not None)
        return out.copy_(tensor)

    def fetch(self, names: Sequence[str]) -> list[State]:
        """Start to bring states to the device; they may be used after :meth:`arrive`."""
        if not self.offload:
            return [self._states[name] for name in names]
        with torch.cuda.stream(self._stream):
            return [
                {k: t.to(self._device, non_blocking=True, copy=True) for k, t in self._states[name].items()}
                for name in names
            ]

    def arrive(self, states: Sequence[State]) -> None:
        """Let computation wait for what :meth:`fetch` started last."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for tensor in (t for state in states for t in state.values()):
                tensor.record_stream(current)

    def put_back(self, names: Sequence[str], states: Sequence[State]) -> None:
        """Start to write changed ``states`` back."""
        if not self.offload:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, state in zip(names, states, strict=True):
                for key, tensor in state.items():
                    self._states[name][key].copy_(tensor, non_blocking=True)
                    if self._stream is not None:
                        tensor.record_stream(self._stream)


class Visit:
    """One walk of a step through batches of states, each to be taken and given back in order."""

    def __init__(self, store: StateStore, batches: Sequence[Sequence[str]]) -> None:
        self._store, self._batches = store, batches
        self._number = 0
        self._coming = store.fetch(batches[0]) if batches else []

    def take(self) -> list[State]:
        """Return the states of the next batch, on the device, and start to fetch the one after."""
        states = self._coming
        self._store.arrive(states)
        later = self._number + 1
        self._coming = self._store.fetch(self._batches[later]) if later < len(self._batches) else []
        return states

    def give_back(self, states: Sequence[State]) -> None:
        """Return what :meth:`take` gave, changed."""
        self._store.put_back(self._batches[self._number], states)
        self._number += 1


def state_names(spec: ParamSpec) -> tuple[str, ...]:
    """Return the names under which the states of ``spec``'s logical matrices are kept, in order."""
    return tuple(f"{spec.name}/{fragment.name}" for fragment in spec.fragments) or (spec.name,)
