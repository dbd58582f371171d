"""Machines that a projection is made for: one YAML file each in ``experiments/hardware/``.

A name is the file's, for example ``h100``, with the number of devices behind it: ``h100x256``.  Peaks are data sheets';
what real kernels reach of them is an assumption with a range, and both have a source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from impl.errors import ConfigError, unknown
from impl.harness.spec import Frozen, load_yaml, parse
from impl.projection import uncertain
from impl.projection.uncertain import Samples

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "hardware"
LOCAL = "local"
"""The machine at hand, known by its measured kernel table alone."""

Precision = Literal["float32", "tf32", "bfloat16", "float64"]
Reached = Literal["product", "product_fp32", "attention", "qr", "eigh", "memory", "node", "network", "host"]
"""What has an efficiency: matrix products on tensor cores and in full fp32, attention, solvers, memory, links."""


class Assumption(Frozen):
    """A fraction of a peak that is not on the data sheet: 90 of 100 cases lie in ``low .. high``."""

    low: float = Field(gt=0, le=1)
    nominal: float = Field(gt=0, le=1)
    high: float = Field(gt=0, le=1)
    source: str

    @model_validator(mode="after")
    def _ordered(self) -> Assumption:
        if not self.low <= self.nominal <= self.high:
            raise ValueError(f"needs low <= nominal <= high, not {self.low}, {self.nominal}, {self.high}")
        return self

    @property
    def range(self) -> uncertain.Range:
        """Its numbers."""
        return uncertain.Range(self.low, self.nominal, self.high)


class Device(Frozen):
    """One accelerator.

    names: that torch gives it; kernel tables of devices so named apply.
    memory_bytes: that a process can allocate.  peak_flops: dense operations a second, by precision.
    memory_bandwidth: bytes a second.  launch: seconds between two kernels that the host sends off one by one,
        an assumption that may be off by a factor of 2.
    """

    names: tuple[str, ...] = Field(min_length=1)
    memory_bytes: int = Field(gt=0)
    peak_flops: dict[Precision, float]
    memory_bandwidth: float = Field(gt=0)
    launch: float = Field(gt=0)
    source: str


class LinkSpec(Frozen):
    """A link: bytes a second of one device in one direction, seconds a hop (which may be off by a factor of 2)."""

    bandwidth: float = Field(gt=0)
    latency: float = Field(gt=0)
    source: str


class NodeSpec(LinkSpec):
    """Devices that share a node, and the links between them."""

    devices: int = Field(gt=0)


class JobSpec(Frozen):
    """What a job asks a batch system for; no projection depends on it.

    cpus, memory_mb: cores and MiB of host memory for each device.
    minutes: the longest that a job may take, by experiment; ``default`` is for those that are not named.
    """

    cpus: int = Field(gt=0)
    memory_mb: int = Field(ge=500)
    minutes: dict[str, int]

    @model_validator(mode="after")
    def _has_default(self) -> JobSpec:
        if "default" not in self.minutes or min(self.minutes.values()) <= 0:
            raise ValueError("minutes needs a default, and every limit must be positive")
        return self


class HardwareSpec(Frozen):
    """A kind of cluster: equal nodes of equal devices.  network: a device's own share; host: device to CPU memory."""

    id: str = Field(pattern=r"^[a-z0-9-]+$")
    display_name: str
    device: Device
    node: NodeSpec
    network: LinkSpec
    host: LinkSpec
    efficiency: dict[Reached, Assumption]
    jobs: JobSpec | None = None

    @model_validator(mode="after")
    def _complete(self) -> HardwareSpec:
        for name in Reached.__args__:  # type: ignore[attr-defined]
            if name not in self.efficiency:
                raise ValueError(f"efficiency needs {name}")
        return self


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: ``ranks`` of them, ``stride`` apart.  Ranks fill one node after the other."""

    ranks: int
    stride: int = 1


@dataclass(frozen=True)
class Link:
    """What one rank of a group has: bytes a second in one direction, seconds a hop, both ``[1 + DRAWS]``."""

    bandwidth: Samples
    latency: Samples
    evidence: str


@dataclass(frozen=True)
class Hardware:
    """``count`` devices of a kind.  name: as it was asked for."""

    name: str
    spec: HardwareSpec
    count: int

    @property
    def memory_bytes(self) -> int:
        """Of one device."""
        return self.spec.device.memory_bytes

    @property
    def launch(self) -> Samples:
        """Seconds a kernel launch ``[1 + DRAWS]``."""
        return _within_two(self.spec.device.launch).draws(f"{self.spec.id}/launch")

    def reached(self, what: Reached) -> Samples:
        """Return the efficiency of ``what`` ``[1 + DRAWS]``: equal draws on all machines of a kind."""
        return self.spec.efficiency[what].range.draws(f"{self.spec.id}/{what}")

    def assumption(self, what: Reached) -> str:
        """Return an efficiency with its range as text."""
        it = self.spec.efficiency[what]
        return f"{it.nominal:.2f} [{it.low:.2f}, {it.high:.2f}]"

    def link(self, group: Group) -> Link:
        """Return the link of a rank of ``group``.

        Inside a node it is the node's.  Otherwise the group's members in one node share their own network links, but a
        rank can use no more than its link inside the node.
        """
        node, network = self.spec.node, self.spec.network
        if (group.ranks - 1) * group.stride < node.devices:
            evidence = f"link: {node.bandwidth / 1e9:g} GB/s in a node at {self.assumption('node')}"
            hop = _within_two(node.latency).draws(f"{self.spec.id}/node latency")
            return Link(node.bandwidth * self.reached("node"), hop, evidence)
        together = max(1, node.devices // group.stride)
        outside = together * network.bandwidth * self.reached("network")
        bandwidth = outside if together == 1 else outside.clip(max=node.bandwidth * self.reached("node"))
        shared = f" x {together} devices of a node" if together > 1 else ""
        evidence = f"link: {network.bandwidth / 1e9:g} GB/s between nodes{shared} at {self.assumption('network')}"
        hop = _within_two(network.latency).draws(f"{self.spec.id}/network latency")
        return Link(bandwidth, hop, evidence)


def _within_two(value: float) -> uncertain.Range:
    """Return the range of an assumption that may be off by a factor of 2."""
    return uncertain.Range(value / 2, value, 2 * value)


def names(folder: Path = FOLDER) -> list[str]:
    """Return the kinds of hardware in ``folder``, sorted."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def load(name: str, folder: Path = FOLDER) -> Hardware:
    """Return the hardware ``name``: a kind and the number of devices, for example ``h100x256``.

    Raises :class:`ConfigError` for an unknown kind, a missing number or a wrong file.
    """
    kind, count = split(name, folder)
    return Hardware(name, load_kind(kind, folder), count)


def load_kind(kind: str, folder: Path = FOLDER) -> HardwareSpec:
    """Return the hardware file of a ``kind``, for example ``h100``; raises :class:`ConfigError`."""
    if kind not in names(folder):
        raise unknown("hardware", kind, names(folder))
    path = folder / f"{kind}.yaml"
    try:
        spec = parse(HardwareSpec, load_yaml(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if spec.id != kind:
        raise ConfigError(f"{path}: id must be {kind!r}, as in the file's name, not {spec.id!r}")
    return spec


def split(name: str, folder: Path = FOLDER) -> tuple[str, int]:
    """Return kind and number of devices of ``name``; raises :class:`ConfigError` if it is no such name."""
    known = names(folder)
    if name in known:  # rtx3090, too, looks like a name with a number of devices
        raise ConfigError(f"hardware {name!r}: say how many devices, for example {name}x8")
    found = re.fullmatch(r"(?P<kind>[a-z0-9-]+)x(?P<count>[1-9][0-9]*)", name)
    if found is None or found["kind"] not in known:
        raise unknown("hardware", name, [*known, LOCAL])
    return found["kind"], int(found["count"])
