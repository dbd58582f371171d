"""Global batches of streamed documents that stay the same when a run goes on with another number of DP ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from impl.harness.stream_data import PackedStream


class PartedStream:
    """One DP rank's rows of the global batch (see :class:`impl.harness.data.TokenStream`).

    The dataset is read in ``parts``, as many as the run had DP ranks when it began, and a batch is the rows of part 0,
    then those of part 1, and so on.  With another number of ranks each still takes its contiguous rows, and reads the
    parts that these come from.

    open_part: returns the stream of a part, with ``batch / parts`` rows: called with part, parts, held-out sequences.
    batch: sequences over all DP ranks.
    """

    def __init__(
        self,
        open_part: Callable[[int, int, int], PackedStream],
        *,
        batch: int,
        dp_rank: int,
        dp: int,
        heldout_sequences: int,
    ) -> None:
        self._open, self._batch = open_part, batch
        share = batch // dp
        self._low, self._high = dp_rank * share, (dp_rank + 1) * share
        self._parts, self._streams = dp, {dp_rank: open_part(dp_rank, dp, heldout_sequences)}
        self._heldout = self._streams[dp_rank].heldout()

    def batch(self, step: int) -> Tensor:
        """Return the next ``[batch / dp, sequence + 1]`` int64 sequences; steps must be asked for in order, from 1."""
        rows = self._batch // self._parts
        found = []
        for part, stream in self._streams.items():
            start = part * rows
            found.append(stream.batch(step)[max(self._low - start, 0) : self._high - start])
        return torch.cat(found)

    def heldout(self) -> Tensor:
        """Return the held-out sequences, ``[heldout_sequences, sequence + 1]`` int64; the same on every rank."""
        return self._heldout

    def state_dict(self) -> dict[str, Any]:
        """Return the places in the parts that this rank reads, as plain JSON data."""
        return {"parts": self._parts, "places": {str(p): s.state_dict() for p, s in self._streams.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the places in ``state``, which must have those of the parts that this rank needs."""
        if state["parts"] != self._parts:
            self._parts = state["parts"]
            rows = self._batch // self._parts
            needed = range(self._low // rows, -(-self._high // rows))
            self._streams = {part: self._open(part, self._parts, 0) for part in needed}
        for part, stream in self._streams.items():
            stream.load_state_dict(state["places"][str(part)])


def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a stream from which every rank of any mesh can go on, out of all ranks' states."""
    if not any(states):  # text, which has none
        return {}
    places = {part: place for state in states for part, place in state["places"].items()}
    return {"parts": states[0]["parts"], "places": dict(sorted(places.items(), key=lambda item: int(item[0])))}
