"""A machine known by its kernel table: exact rows where there are any, sizes in between interpolated."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

import numpy as np

from impl.errors import ConfigError
from impl.optimizers.base import Optimizer, Shape
from impl.projection import hardware as hardware_module
from impl.projection import kernel_table
from impl.projection.hardware import LOCAL, Group
from impl.projection.kernel_table import Row, Table
from impl.projection.machine import Block, Collective, Machine, Roofline
from impl.projection.uncertain import Cost, Range

ALONE = ("update", "norm", "norm-exact", "copy", "copy-from-host")
"""Kernels that ``impl kernels --model`` measures too (``apply`` in bfloat16); all others are those of a run."""
REACH = 4.0
"""A time is extrapolated to this factor below the smallest and above the largest measured size, no further."""


@dataclass(frozen=True)
class Measured:
    """A machine whose kernels were measured with ``processes`` of them busy at the same time.

    fallback: answers what the table lacks; without one that is a :class:`ConfigError`.

    A collective is found under the number of its ranks, whatever their stride: all are processes of one machine.
    """

    table: Table
    processes: int = 1
    fallback: Machine | None = None

    @property
    def name(self) -> str:
        """Of the fallback, else ``local``."""
        return LOCAL if self.fallback is None else self.fallback.name

    @property
    def memory_bytes(self) -> int | None:
        """Of one device, None if that is not known."""
        return None if self.fallback is None else self.fallback.memory_bytes

    @property
    def devices_per_node(self) -> int:
        """Of the fallback; the measured processes are all on one machine."""
        return self.processes if self.fallback is None else self.fallback.devices_per_node

    @property
    def shared(self) -> bool:
        """Whether communication runs on the cores that compute, as on a CPU."""
        return self.table.backend == "cpu"

    @property
    def cores(self) -> int | None:
        """The cores that all ranks share, None where each has a device."""
        return self.table.cores

    def on(self, processes: int) -> Measured:
        """Return the same machine with another number of busy processes."""
        return dataclasses.replace(self, processes=processes)

    def forward(self, block: Block) -> Cost:
        """Return the measured forward."""
        return self._block("forward", block)

    def backward(self, block: Block) -> Cost:
        """Return the measured backward, which has all work on gradients: zeros, fp32 sums, scaling."""
        return self._block("backward", block)

    def gradients(self, block: Block) -> Cost:
        """Return nothing where the backward was measured, which contains it (in each microbatch)."""
        if self._exact("backward", kernel_table.block_key(block)) is None and self.fallback is not None:
            return self.fallback.gradients(block)
        return Cost.nothing()

    def update(self, optimizer: Optimizer, shape: Shape) -> Cost:
        """Return the measured mean of a refresh period; elementwise rules are interpolated by size."""
        key, size = kernel_table.update_key(optimizer, shape)
        found = self._sized("update", key, size) if size else self._exact("update", key)
        if found is None and self.fallback is not None:
            return self.fallback.update(optimizer, shape)
        sides = "x".join(map(str, shape))
        return found or self._missing("update", f"{optimizer.name} {sides}")

    def apply(self, elements: int, dtype: str) -> Cost:
        """Return the measured decay and step."""
        found = self._sized("apply", dtype, elements)
        if found is None and self.fallback is not None:
            return self.fallback.apply(elements, dtype)
        return found or self._missing("apply", f"{elements} {dtype}")

    def norm(self, elements: int, *, exact: bool = False) -> Cost:
        """Return the measured sum of squares.

        exact: of what may be cut anywhere, whose squares the engine sums as integers (:mod:`impl.canzona.norm`).
        """
        kernel = "norm-exact" if exact else "norm"
        found = self._sized(kernel, "float32", elements)
        if found is None and self.fallback is not None:
            return self.fallback.norm(elements, exact=exact)
        return found or self._missing(kernel, str(elements))

    def attention(self, block: Block) -> Cost:
        """Return the measured core attention of one forward of a layer."""
        key = kernel_table.block_key(block, "attention")
        found = self._exact("forward", key)
        if found is None and self.fallback is not None:
            return self.fallback.attention(block)
        return found or self._missing("forward", key)

    def copy(self, count: float, where: Literal["device", "host"] = "device") -> Cost:
        """Return the measured copy of ``count`` bytes inside the device's memory, or between it and the host's."""
        kernel = "copy" if where == "device" else "copy-from-host"
        found = self._sized(kernel, "float32", count)
        if found is None and self.fallback is not None:
            return self.fallback.copy(count, where)
        return found or self._missing(kernel, f"{count:.0f} bytes")

    def collective(self, kind: Collective, sizes: Sequence[float], group: Group) -> Cost:
        """Return the measured collective; of segments the sum is interpolated, unequal ones as rooted calls."""
        whole = float(sum(sizes))
        if group.ranks == 1 or whole == 0:
            return Cost.nothing()
        segments = kind in ("reduce-scatter", "all-gather")
        even = not segments or len(set(sizes)) == 1
        ranks = 2 if kind == "send" else group.ranks
        key = kernel_table.collective_key(ranks, even=even)
        found = self._sized(kind, key, whole)
        if found is None and self.fallback is not None:
            return self.fallback.collective(kind, sizes, group)
        return found or self._missing(kind, f"{key} {whole:.0f} bytes")

    def _block(self, kernel: str, block: Block) -> Cost:
        key = kernel_table.block_key(block)
        found = self._exact(kernel, key)
        if found is None and self.fallback is not None:
            return self.fallback.forward(block) if kernel == "forward" else self.fallback.backward(block)
        return found or self._missing(kernel, key)

    def _exact(self, kernel: str, key: str) -> Cost | None:
        row = self.table.find(kernel, key, self.processes)
        return None if row is None else Cost.of(self._range(row).draws(_name(row)), self._evidence([row]))

    def _sized(self, kernel: str, key: str, size: float) -> Cost | None:
        """Return the time at ``size``: log time linear in log size between neighbours; None if it is out of reach."""
        if size == 0:
            return Cost.nothing()
        rows = self.table.sizes(kernel, key, self.processes)
        if not rows or not rows[0].size / REACH <= size <= rows[-1].size * REACH:
            return None
        at = bisect.bisect_left([row.size for row in rows], size)
        if at < len(rows) and rows[at].size == size:
            return Cost.of(self._range(rows[at]).draws(_name(rows[at])), self._evidence([rows[at]]))
        if len(rows) == 1:  # in proportion above, the same below
            slope, (row,) = float(size > rows[0].size), rows
            samples = self._range(row).draws(_name(row)) * (size / row.size) ** slope
            return Cost.of(samples, self._evidence([row], extrapolated=True))
        low, high = rows[max(at - 1, 0) : max(at - 1, 0) + 2] if 0 < at < len(rows) else _end(rows, at)
        share = math.log(size / low.size) / math.log(high.size / low.size)
        first, second = (np.log(self._range(row).draws(_name(row))) for row in (low, high))
        if 0 <= share <= 1:
            return Cost.of(np.exp(first + share * (second - first)), self._evidence([low, high]))
        # beyond an end: no faster than constant, no slower than in proportion
        slope = min(max(math.log(high.seconds / low.seconds) / math.log(high.size / low.size), 0.0), 1.0)
        end, log_time = (high, second) if share > 1 else (low, first)
        return Cost.of(np.exp(log_time + slope * math.log(size / end.size)), self._evidence([end], extrapolated=True))

    def _range(self, row: Row) -> Range:
        """Return the 5th to 95th percentile of a log-normal distribution with the row's quartiles."""
        return Range.of_quartiles(row.q25, row.seconds, row.q75)

    def _evidence(self, rows: Sequence[Row], *, extrapolated: bool = False) -> str:
        how = f" (extrapolated from size {rows[0].size})" if extrapolated else ""
        how = " (between sizes)" if len(rows) > 1 else how
        return f"measured: {rows[0].device}, n={min(row.n for row in rows)}, {self.table.source}{how}"

    def _missing(self, kernel: str, what: str) -> NoReturn:
        busy = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        head = f"no measurement of {kernel} {what} with {busy}: "
        if what.startswith("attention"):
            raise ConfigError(
                f"{head}core attention is not measured apart from its layer: use another --recompute, or give hardware "
                "with peaks"
            )
        command = f"run `python -m impl kernels --out {self.table.path or 'FILE'}"
        runs = "--experiment EXPERIMENT.yaml` with an experiment whose runs have it"
        if kernel in ALONE or (kernel == "apply" and what.endswith("bfloat16")):
            raise ConfigError(f"{head}{command} --processes {self.processes} --model MODEL ...` for it, or {runs}")
        raise ConfigError(f"{head}{command} {runs}")


def _end(rows: Sequence[Row], at: int) -> tuple[Row, Row]:
    """Return the two rows at the end beyond which position ``at`` lies."""
    return (rows[0], rows[1]) if at == 0 else (rows[-2], rows[-1])


def _name(row: Row) -> str:
    return f"{row.device}/{kernel_table.describe(*row.identity)}"


def load_machine(hardware: str | None, kernels: Path | None, ranks: int = 1, *, pipeline: bool = False) -> Machine:
    """Return the machine ``hardware`` (for example ``h100x256``), with measured kernels where the table has them.

    hardware: ``local`` or None is the machine of the table alone.
    ranks: of what is projected.  On a CPU they share its cores, so kernels count that were measured with as many busy
        processes; on GPUs those with as many if there are any, else with one.
    pipeline: the ranks are stages, which take turns: no more of them than cores are busy at the same time.

    Raises :class:`ConfigError` if the table is of another device, cannot be read, or is needed and not there.
    """
    if hardware in (None, LOCAL):
        if kernels is None:
            what = (
                "give --hardware, for example h100x256"
                if hardware is None
                else f"hardware {LOCAL} needs --kernels FILE"
            )
            raise ConfigError(f"{what}, or a table of `python -m impl kernels`")
        table = _filled(kernels)
        busy = min(ranks, table.cores or ranks) if pipeline else ranks
        if table.backend != "cpu" and busy not in table.processes():
            busy = 1  # each process has a GPU of its own, so one alone is as fast
        return Measured(table, busy)
    roofline = Roofline(hardware_module.load(hardware))
    if kernels is None:
        return roofline
    table, wanted = _filled(kernels), roofline.hardware.spec.device.names
    if table.device not in wanted:
        raise ConfigError(
            f"{kernels} was measured on {table.device}, which is no {wanted[0]}: give the hardware that it is of, or "
            "leave --kernels out"
        )
    return Measured(table, 1, roofline)


def _filled(path: Path) -> Table:
    table = kernel_table.read(path)
    if not table.processes():
        raise ConfigError(f"{path} holds no measured time: run `python -m impl kernels --out {path} ...`")
    return table
