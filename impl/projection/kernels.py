"""Measures kernels with this project's own code: each case on every process at the same time, the slowest counts.

Times are wall time on a CPU and events on a GPU.  A sample begins with a barrier.  Before a case comes back to the same
data it has gone through more than a cache holds, as a training step does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from impl.canzona.norm import CHUNK, square_limbs, square_sum
from impl.optimizers.base import Optimizer
from impl.projection.kernel_blocks import block_sample
from impl.projection.kernel_cases import (
    COLD_BYTES,
    BlockCase,
    Case,
    CollectiveCase,
    PassCase,
    ProductCase,
    UpdateCase,
)
from impl.projection.kernel_collectives import collective_work

SHORTEST_S = 2e-3
"""A sample repeats what is shorter than this, so that neither timer nor barrier counts."""
FEWEST, SOME, MOST = 3, 6, 25
"""Samples of a case: at least, at least if one is within the budget, and at most."""
Sample = Callable[[], list[float]]
"""Runs a case once and returns seconds, the same number of them each time."""


@dataclass(frozen=True)
class Bench:
    """Where to measure.  rank: of this process among ``processes`` that call the same in the same order."""

    device: torch.device
    rank: int
    processes: int

    def seconds(self, work: Callable[[], object]) -> float:
        """Return how long ``work`` takes on the device."""
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize(self.device)
            return begin.elapsed_time(end) / 1e3
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def largest(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the largest of each of ``values`` over all processes."""
        if self.processes == 1:
            return values
        tensor = torch.from_numpy(values.copy()).to(self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.cpu().numpy()

    def barrier(self) -> None:
        """Wait for the other processes, and on a GPU for the device."""
        if self.processes > 1:
            dist.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(case: Case, bench: Bench, budget: float) -> NDArray[np.float64]:
    """Return samples ``[n, columns]`` of ``case`` in about ``budget`` seconds, each of the slowest process.

    Columns are forward and backward of a block, mean and slowest step of an update, else the seconds.  All processes
    must call.
    """
    sample = _sample(case, bench)
    took = _slowest_wall(sample, bench)
    if took < budget / 2:  # a longer one, such as a refresh period, is warm by now
        took = _slowest_wall(sample, bench)
    count = min(MOST, max(SOME if took <= budget else FEWEST, int(budget / max(took, 1e-6))))
    rows = []
    for _ in range(count):
        bench.barrier()
        rows.append(sample())
    return bench.largest(np.array(rows, dtype=np.float64))


def _slowest_wall(sample: Sample, bench: Bench) -> float:
    """Run ``sample`` and return its seconds on the slowest process, setting-up of data between timings included."""
    begin = time.perf_counter()
    sample()
    return float(bench.largest(np.array([time.perf_counter() - begin]))[0])


def _sample(case: Case, bench: Bench) -> Sample:
    if isinstance(case, BlockCase):
        return block_sample(case, bench.device, bench.seconds)
    if isinstance(case, UpdateCase):
        return _update(case, bench)
    if isinstance(case, PassCase):
        works = _copies(case, bench) if case.case.startswith("copy") else _passes(case, bench)
    elif isinstance(case, ProductCase):
        works = _products(case, bench)
    elif isinstance(case, CollectiveCase):
        works = collective_work(case, bench.device, bench.rank, bench.processes, copies(float(case.size)))
    else:
        return _launches(bench)
    return _repeated(works, bench)


def _repeated(works: Callable[[], object], bench: Bench) -> Sample:
    """Return the sample of one call of ``works``, repeated on all processes alike until it is long enough."""
    works()
    first = float(bench.largest(np.array([bench.seconds(works)]))[0])
    repeats = max(1, math.ceil(SHORTEST_S / max(first, 1e-7)))

    def many() -> None:
        for _ in range(repeats):
            works()

    return lambda: [bench.seconds(many) / repeats]


def _launches(bench: Bench) -> Sample:
    one, count = torch.zeros(1, device=bench.device), 500

    def many() -> None:
        for _ in range(count):
            one.add_(1.0)

    return lambda: [bench.seconds(many) / count]


def copies(case_bytes: float) -> int:
    """Return how many copies of data of this size no cache keeps; one is enough for large data."""
    return max(1, min(64, math.ceil(COLD_BYTES / max(case_bytes, 1.0))))


class UpdateSets:
    """Batches of equal tensors with gradients and states, each advanced by the optimizer's own ``update_many``."""

    def __init__(self, case: UpdateCase, device: torch.device) -> None:
        self.rule: Optimizer = case.rule
        self.shape, self.device = case.shape, device
        self.period = int(getattr(self.rule.hyper, "period", 1))
        count = copies(2.0 * case.set_bytes)  # what the computation holds takes as much again
        if self.period > 1:
            count = 1  # a period is long, and most of it computes rather than reads
        self.generator = torch.Generator(device).manual_seed(0)
        self.grads = [[torch.empty(case.shape, device=device) for _ in range(case.batch)] for _ in range(count)]
        self.states = [[self.rule.init_state(case.shape, device) for _ in range(case.batch)] for _ in range(count)]
        for number, state in enumerate(state for states in self.states for state in states):
            self.rule.place(state, number)
        self.tensors = count * case.batch
        self.step = 0

    def advance(self, seconds: Callable[[Callable[[], object]], float]) -> float:
        """Do one step of every batch on fresh gradients; return the seconds of one tensor."""
        if self.rule.atomic or not self.step:  # an elementwise rule takes as long with old ones
            for grad in (grad for grads in self.grads for grad in grads):
                grad.normal_(generator=self.generator)
        self.step += 1

        def work() -> None:
            for grads, states in zip(self.grads, self.states, strict=True):
                self.rule.update_many(grads, states, self.step)

        return seconds(work) / self.tensors


def _update(case: UpdateCase, bench: Bench) -> Sample:
    """Return the sample of one refresh period: the mean over its steps, and its slowest step."""
    sets = UpdateSets(case, bench.device)
    for _ in range(2):  # the first step starts states and bases
        sets.advance(bench.seconds)

    def period() -> list[float]:
        steps = [sets.advance(bench.seconds) for _ in range(sets.period)]
        return [sum(steps) / len(steps), max(steps)]

    if sets.period > 1:
        return period
    whole = sets.advance(bench.seconds) * sets.tensors
    several = max(1, min(20, math.ceil(SHORTEST_S / max(whole, 1e-7))))
    several = int(bench.largest(np.array([float(several)]))[0])

    def steps() -> list[float]:
        return [sum(sets.advance(bench.seconds) for _ in range(several)) / several]

    return steps


def _passes(case: PassCase, bench: Bench) -> Callable[[], object]:
    """Return the work of ``apply`` or a norm on one of several copies of the data after the other."""
    device, dtype = bench.device, getattr(torch, case.dtype)
    number = copies(4.0 * case.size * (3 if case.case == "apply" else 1))
    sets = [_Data.make(case.size, dtype, device) for _ in range(number)]
    spans = [(at, min(at + case.piece, case.size)) for at in range(0, case.size, case.piece)]
    turn = cycle(range(number))

    def apply() -> None:
        data = sets[next(turn)]
        for low, high in spans:
            data.master[low:high].mul_(1.0 - 1e-4).add_(data.gradient[low:high], alpha=-1e-3)
            if dtype != torch.float32:
                data.parameters[low:high].copy_(data.master[low:high])

    def norm() -> None:
        data = sets[next(turn)]
        for low, high in spans:
            square_sum(data.gradient[low:high])

    def exact() -> None:
        for part in sets[next(turn)].gradient.split(CHUNK):
            square_limbs(part)

    return {"apply": apply, "norm": norm, "norm-exact": exact}[case.case]


@dataclass(frozen=True)
class _Data:
    """Flat vectors of one rank: fp32 gradients and masters, and the parameters that are rounded from these."""

    gradient: Tensor
    master: Tensor
    parameters: Tensor

    @classmethod
    def make(cls, size: int, dtype: torch.dtype, device: torch.device) -> _Data:
        gradient = torch.randn(size, device=device).mul_(1e-3)
        return cls(gradient, torch.randn(size, device=device), torch.empty(size, dtype=dtype, device=device))


def _copies(case: PassCase, bench: Bench) -> Callable[[], object]:
    number, elements = copies(2.0 * case.size), max(1, case.size // 4)
    pinned = case.case == "copy-from-host" and bench.device.type == "cuda"
    home = torch.device("cpu") if case.case == "copy-from-host" else bench.device
    sources = [torch.ones(elements, device=home, pin_memory=pinned) for _ in range(number)]
    targets = [torch.zeros(elements, device=bench.device) for _ in range(number)]
    turn = cycle(range(number))

    def copy() -> None:
        at = next(turn)
        targets[at].copy_(sources[at], non_blocking=True)

    return copy


def _products(case: ProductCase, bench: Bench) -> Callable[[], object]:
    dtype = getattr(torch, case.dtype)
    left = torch.randn(case.m, case.k, device=bench.device).to(dtype)
    number = copies(case.bytes())
    weights = [torch.randn(case.k, case.n, device=bench.device).to(dtype) for _ in range(number)]
    turn = cycle(range(number))
    return lambda: left @ weights[next(turn)]
