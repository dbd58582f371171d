"""How the processes of a pipeline reach each other: groups, and channels between neighbouring stages."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from impl.canzona.mesh import Mesh
from impl.rotation.schedule import Action, Kind


class Channel:
    """Tensors from this rank to ``peer``, or from ``peer`` to this rank, first in, first out.

    Sending never waits, so the order in which two stages send to each other cannot make them wait for each other.
    A message and its handle are kept until :meth:`settle` is told that the peer has it.  Each tensor comes with a flag:
    the pipeline stops at this microbatch.
    """

    def __init__(self, peer: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._peer, self._group, self._device = peer, group, device
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._settled = 0

    def send(self, tensor: Tensor, *, stop: bool = False) -> None:
        """Start to send a copy of the fp32 ``tensor``."""
        message = torch.cat((tensor.detach().reshape(-1), tensor.new_full((1,), float(stop))))
        work = dist.isend(message, self._peer, group=self._group)
        self._sent.append((cast(dist.Work, work), message))

    def receive(self, shape: Sequence[int]) -> tuple[Tensor, bool]:
        """Wait for the next fp32 tensor, of ``shape``; return it and its flag.

        Raises ``RuntimeError`` when the group's time is up or the peer is gone.
        """
        message = torch.empty(torch.Size(shape).numel() + 1, dtype=torch.float32, device=self._device)
        cast(dist.Work, dist.irecv(message, self._peer, group=self._group)).wait()
        return message[:-1].view(*shape), bool(message[-1])

    def start_at(self, received: int) -> None:
        """Go on where the peer had ``received`` the first messages of the run, which will not be sent again."""
        self._settled = received

    def settle(self, count: int | None = None) -> None:
        """Free all messages, or the first ``count`` of the run, which the peer must have received or be receiving."""
        while self._sent and (count is None or self._settled < count):
            self._sent.popleft()[0].wait()
            self._settled += 1


def received_before(actions: Sequence[Action], counted: Kind, mark: Kind) -> dict[int, int]:
    """Return for the number of each ``mark`` action how many ``counted`` actions come before it.

    A message of a neighbour's action says that it has done all before it, so has received what that needed.
    """
    done, out = 0, dict[int, int]()
    for action in actions:
        done += action.kind == counted
        if action.kind == mark:
            out[action.number] = done
    return out


@dataclass(frozen=True)
class Place:
    """The place of this rank in a pipeline of processes: rank = ``stage * replicas + replica``.

    mesh: of the stage's replicas.
    """

    stage: int
    stages: int
    replica: int
    mesh: Mesh
    forward_in: Channel | None
    forward_out: Channel | None
    backward_in: Channel | None
    backward_out: Channel | None
    heldout_in: Channel | None
    heldout_out: Channel | None


def connect(stages: int, replicas: int, device: torch.device, timeout: timedelta) -> Place:
    """Build groups and channels; every rank of the default process group must call this with the same arguments.

    Activations, gradients and held-out activations have a group each: on a GPU the messages of one group and pair of
    ranks are executed in order, and must not wait for those of another direction.
    """
    if dist.get_world_size() != stages * replicas:
        raise ValueError(f"{stages} x {replicas} processes are needed, there are {dist.get_world_size()}")
    stage, replica = divmod(dist.get_rank(), replicas)
    world = range(stages * replicas)
    of_stage = [_group(list(world)[k * replicas : (k + 1) * replicas], timeout) for k in range(stages)]
    alone = of_stage if replicas == 1 else [_group([rank], timeout) for rank in world]
    own, me = of_stage[stage], alone[dist.get_rank()]
    mesh = Mesh(replicas, 1, replica, 0, own, me, own, device)
    down, up, heldout = (_group(list(world), timeout) for _ in range(3))

    def channel(neighbour: int, group: dist.ProcessGroup) -> Channel | None:
        if not 0 <= neighbour < stages:
            return None
        return Channel(neighbour * replicas + replica, group, device)

    before, after = stage - 1, stage + 1
    return Place(
        stage,
        stages,
        replica,
        mesh,
        forward_in=channel(before, down),
        forward_out=channel(after, down),
        backward_in=channel(after, up),
        backward_out=channel(before, up),
        heldout_in=channel(before, heldout),
        heldout_out=channel(after, heldout),
    )


def _group(ranks: list[int], timeout: timedelta) -> dist.ProcessGroup:
    return cast(dist.ProcessGroup, dist.new_group(ranks, timeout=timeout))
