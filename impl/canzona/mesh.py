"""The DP x TP mesh of rank processes and its groups."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Mesh:
    """The place of this rank in a ``dp`` x ``tp`` mesh; rank = ``dp_rank * tp + tp_rank`` (TP ranks are neighbours).

    dp_group: the ranks with this ``tp_rank``; they hold replicas of the same shards.
    tp_group: the ranks with this ``dp_rank``; they hold the shards of one replica.
    world_group: all of them.
    """

    dp: int
    tp: int
    dp_rank: int
    tp_rank: int
    dp_group: dist.ProcessGroup
    tp_group: dist.ProcessGroup
    world_group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        """Number of this rank in the mesh."""
        return self.dp_rank * self.tp + self.tp_rank

    @classmethod
    def create(cls, dp: int, tp: int, device: torch.device, *, timeout: timedelta | None = None) -> Mesh:
        """Build the groups; every rank of the default process group must call this with the same arguments."""
        order, me = list(range(dist.get_world_size())), dist.get_rank()
        if len(order) != dp * tp:
            raise ValueError(f"a {dp} x {tp} mesh needs {dp * tp} ranks, there are {len(order)}")
        rows = [_group(order[d * tp : (d + 1) * tp], timeout) for d in range(dp)]
        columns = [_group(order[t::tp], timeout) for t in range(tp)]
        world = _group(order, timeout)
        return cls(dp, tp, me // tp, me % tp, columns[me % tp], rows[me // tp], world, device)


def _group(ranks: list[int], timeout: timedelta | None) -> dist.ProcessGroup:
    """Return the new group; on ranks outside it an inert placeholder, which nobody uses."""
    return cast(dist.ProcessGroup, dist.new_group(ranks, timeout=timeout))
