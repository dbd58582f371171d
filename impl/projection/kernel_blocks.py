"""Measures forward and backward of a part of a model: the model's own modules and the engine's own gradient buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

from impl.canzona.buffers import FamilyBuffer, trainable
from impl.canzona.collectives import Communicator, Ledger
from impl.canzona.reducer import GradientReducer
from impl.canzona.strategies import make_plan
from impl.models import catalogue, gpt, weights
from impl.models.catalogue import ModelConfig, Part
from impl.models.gpt import PortableGPT
from impl.optimizers.base import create
from impl.optimizers.routing import ELEMENTWISE
from impl.projection.kernel_cases import BlockCase

Seconds = Callable[[Callable[[], object]], float]


def block_sample(case: BlockCase, device: torch.device, seconds: Seconds) -> Callable[[], list[float]]:
    """Return a function that returns the seconds of one block's forward and of its backward.

    ``case.copies`` layers run one after the other.  The backward has the engine's whole work on gradients: buffers set
    to zero, fp32 sums, the scaling that goes before a reduction.  What tensor-parallel ranks send each other takes no
    time here: it is a collective, and measured as one.
    """
    config = catalogue.load(case.model, max(case.copies, 1))
    group = lonely_group(case.tp)
    model = gpt.build_model(config, group, dtype=getattr(torch, case.dtype), device=device, part=part_of(case, config))
    weights.initialize(model, config, 0, 0, case.tp, model.part)
    reducer = _reducer(model, config, case.tp)
    tokens = torch.randint(config.arch.vocab_size, (case.rows, case.sequence + 1), device=device)
    shape = case.sequence, case.rows, config.arch.hidden_size
    hidden = torch.randn(shape, device=device).to(getattr(torch, case.dtype))
    gradient = torch.randn_like(hidden) / hidden.numel()
    outputs: list[Tensor] = []

    def forward() -> None:
        leaf = None if case.kind == "embedding" else hidden.detach().requires_grad_()
        outputs.append(gpt.forward_stage(model, leaf, None if case.kind == "layer" else tokens))

    def backward() -> None:
        reducer.open(last=True)
        outputs[0].backward(None if case.kind == "head" else gradient)
        reducer.close()
        reducer.wait()

    def once() -> list[float]:
        times = [seconds(forward) / case.copies, seconds(backward) / case.copies]
        outputs.clear()
        return times

    return once


def part_of(case: BlockCase, config: ModelConfig) -> Part:
    """Return the part of ``config`` that the case runs; ``config`` has as many layers as the case has copies."""
    layers = config.arch.num_hidden_layers
    if case.kind == "layer":
        return Part(first=0, last=layers, embedding=False, head=False)
    at = 0 if case.kind == "embedding" else layers
    return Part(first=at, last=at, embedding=case.kind == "embedding", head=case.kind == "head")


def lonely_group(tp: int) -> dist.ProcessGroup:
    """Return a group in which this process is rank 0 of ``tp``, and whose collectives do nothing.

    Of one rank it is a real one.  Processes do not wait for each other here.
    """
    if tp == 1:
        alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        return cast(dist.ProcessGroup, alone)
    return FakeProcessGroup._create_internal(0, tp)  # type: ignore[reportPrivateUsage]


def _reducer(model: PortableGPT, config: ModelConfig, tp: int) -> GradientReducer:
    """Return the engine's reducer of ``model`` on one data-parallel rank: it has the hooks that sum gradients."""
    parameters = config.parameters(tp, model.part)
    rule = create(ELEMENTWISE)
    plan = make_plan("asc", parameters, [rule] * len(parameters), 1, tp)
    modules = trainable(model, plan)
    buffers = [FamilyBuffer(plan, family, modules, 0) for family in plan.families]
    alone = cast(dist.ProcessGroup, dist.new_group([dist.get_rank()], use_local_synchronization=True))
    return GradientReducer(buffers, Communicator(alone, "dp", Ledger()), 1)
