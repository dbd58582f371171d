"""Measures collectives: the engine's own communicator, and the pipeline's own channel."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import cast

import torch
import torch.distributed as dist

from impl.canzona.collectives import Communicator, Ledger
from impl.projection.kernel_cases import CollectiveCase
from impl.rotation.links import Channel


def collective_work(
    case: CollectiveCase, device: torch.device, rank: int, processes: int, number: int
) -> Callable[[], object]:
    """Return one collective on one of ``number`` copies of the data after the other, waited for.

    Every process is in one group of ``case.ranks`` neighbours; all ``processes`` must call.
    """
    if processes % case.ranks:
        raise ValueError(f"{processes} processes cannot be dealt into groups of {case.ranks}")
    mine = None
    for first in range(0, processes, case.ranks):
        group = dist.new_group(list(range(first, first + case.ranks)))
        if first <= rank < first + case.ranks:
            mine = cast(dist.ProcessGroup, group)
    assert mine is not None, "every rank is in one of the groups"
    if case.kind == "send":
        return _send(case, device, rank, mine)
    comm = Communicator(mine, "dp", Ledger())
    ranks, elements = case.ranks, max(case.ranks, case.size // 4)
    if case.kind == "all-to-all":  # the size is what a rank sends to others
        share = max(1, case.size // 4 // (ranks - 1))
        data = [torch.ones(share * ranks, device=device) for _ in range(2 * number)]
        turn = cycle(range(number))

        def exchange() -> None:
            at = 2 * next(turn)
            comm.all_to_all(data[at], data[at + 1], [share] * ranks, [share] * ranks, "kernel").wait()

        return exchange
    elements -= elements % ranks
    flats = [torch.zeros(elements, device=device) for _ in range(number)]
    cuts = [elements * r // ranks for r in range(ranks + 1)]
    if not case.even:  # segments rise by equal steps
        whole = ranks * (ranks + 1) // 2
        cuts = [elements * (r * (r + 1) // 2) // whole for r in range(ranks + 1)]
    turn = cycle(range(number))
    calls = {
        "all-reduce": lambda: comm.all_reduce(flats[next(turn)], "kernel").wait(),
        "reduce-scatter": lambda: comm.reduce_scatter(flats[next(turn)], cuts, "kernel").wait(),
        "all-gather": lambda: comm.all_gather(flats[next(turn)], cuts, "kernel").wait(),
    }
    return calls[case.kind]


def _send(case: CollectiveCase, device: torch.device, rank: int, group: dist.ProcessGroup) -> Callable[[], object]:
    """Return a message from the group's first rank to its second, over a pipeline's own channel."""
    first = rank - rank % case.ranks
    sends = rank == first
    if rank > first + 1:
        return lambda: None
    channel = Channel(first + 1 if sends else first, group, device)
    elements = max(1, case.size // 4 - 1)  # a message carries a flag too
    message = torch.ones(elements, device=device)

    def send() -> None:
        if sends:
            channel.send(message)
            channel.settle()
        else:
            channel.receive((elements,))

    return send
