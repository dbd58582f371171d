"""A TP micro-group at work: gather whole gradients at their hosts, compute, scatter the updates.

Canzona, section 3: one fused all-to-all each way per micro-group.  A matrix hosted by every rank (synchronous compute)
travels to all of them and needs no way back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from impl.canzona.collectives import Communicator, Pending
from impl.canzona.plan import EVERY, MicroGroup
from impl.models.parameters import ParamSpec
from impl.models.sharding import shard, unshard

PHASE = "tp_exchange"


class Exchange:
    """One micro-group of one step; every rank of the TP group makes the same one and calls its methods in order.

    gradients: this rank's TP-local fp32 gradients by parameter index.
    parameters: the specs of all parameters of the plan.
    """

    def __init__(
        self,
        group: MicroGroup,
        parameters: tuple[ParamSpec, ...],
        gradients: Mapping[int, Tensor],
        tp: Communicator,
    ) -> None:
        self._specs = {index: parameters[index] for index in group.parameters}
        self._hosts = dict(zip(group.parameters, group.hosts, strict=True))
        self._local = {i: g for i, g in gradients.items() if i in self._specs}
        self._tp = tp
        alone = tp.size == 1
        self._whole = [i for i, spec in self._specs.items() if alone or spec.tp_dim is None]
        self._cut = [i for i in self._specs if i not in set(self._whole)]
        self.hosted = [i for i in group.parameters if i in self._whole or self._hosts[i] in (tp.rank, EVERY)]
        self._gathering: Pending | None = None
        self._scattering: Pending | None = None
        self._received = self._returned = torch.empty(0)
        self._updates: dict[int, Tensor] = {}

    def start_gather(self) -> None:
        """Send this rank's shards to their hosts."""
        if not self._cut:
            return
        by_host = [self._for_host(host) for host in range(self._tp.size)]
        sent = [sum(self._local[i].numel() for i in members) for members in by_host]
        data = torch.cat([self._local[i].reshape(-1) for members in by_host for i in members])
        received = [sent[self._tp.rank]] * self._tp.size
        self._received = data.new_empty(sum(received))
        self._gathering = self._tp.all_to_all(self._received, data, received, sent, PHASE)

    def finish_gather(self) -> dict[int, Tensor]:
        """Return the whole gradients of the matrices that this rank hosts."""
        whole = {i: self._local[i] for i in self._whole}
        if self._gathering is None:
            return whole
        self._gathering.wait()
        rows = self._received.view(self._tp.size, -1)
        at = 0
        for index in self._for_host(self._tp.rank):
            spec, size = self._specs[index], self._local[index].numel()
            shape = spec.local_shape(self._tp.size)
            whole[index] = unshard([row[at : at + size].view(shape) for row in rows], spec)
            at += size
        self._received = torch.empty(0)
        return {i: whole[i] for i in self.hosted}

    def start_scatter(self, updates: Mapping[int, Tensor]) -> None:
        """Send each rank its shard of the updates that this rank computed."""
        travelling = [i for i in self._cut if self._hosts[i] != EVERY]
        self._updates = {i: self._own_shard(i, u) for i, u in updates.items() if i not in set(travelling)}
        if not travelling:
            return
        size = self._tp.size
        mine = [i for i in travelling if self._hosts[i] == self._tp.rank]
        parts = [shard(updates[i], self._specs[i], size, rank).reshape(-1) for rank in range(size) for i in mine]
        data = torch.cat(parts) if parts else self._local[travelling[0]].new_empty(0)
        self._order = [[i for i in travelling if self._hosts[i] == host] for host in range(size)]
        received = [sum(self._local[i].numel() for i in members) for members in self._order]
        self._returned = data.new_empty(sum(received))
        self._scattering = self._tp.all_to_all(self._returned, data, received, [len(data) // size] * size, PHASE)

    def finish_scatter(self) -> dict[int, Tensor]:
        """Return this rank's shard of every update of the micro-group."""
        if self._scattering is not None:
            self._scattering.wait()
            indices = [i for members in self._order for i in members]
            ends = [0]
            for index in indices:
                ends.append(ends[-1] + self._local[index].numel())
            for index, (low, high) in zip(indices, pairwise(ends), strict=True):
                self._updates[index] = self._returned[low:high].view(self._local[index].shape)
        updates, self._updates, self._returned = self._updates, {}, torch.empty(0)  # the group's memory ends here
        return updates

    def _for_host(self, host: int) -> list[int]:
        return [i for i in self._cut if self._hosts[i] in (host, EVERY)]

    def _own_shard(self, index: int, update: Tensor) -> Tensor:
        if index in self._whole:
            return update
        return shard(update, self._specs[index], self._tp.size, self._tp.rank)


def run_pipelined(
    exchanges: list[Exchange],
    compute: Callable[[dict[int, Tensor]], dict[int, Tensor]],
    apply: Callable[[dict[int, Tensor]], None],
) -> None:
    """Run micro-groups in order, the next gather and the last scatter in flight while one computes.

    compute: whole gradients by parameter -> whole updates.  apply: this rank's shards of updates by parameter.
    """
    if exchanges:
        exchanges[0].start_gather()
    for number, exchange in enumerate(exchanges):
        gradients = exchange.finish_gather()
        if number + 1 < len(exchanges):
            exchanges[number + 1].start_gather()
        updates = compute(gradients)
        exchange.start_scatter(updates)
        if number > 0:
            apply(exchanges[number - 1].finish_scatter())
    if exchanges:
        apply(exchanges[-1].finish_scatter())
