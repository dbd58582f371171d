"""What the jobs of the workflow ask Slurm for: the site's own settings, and the hardware file that they name.

Science is in ``experiments/*.yaml`` and never here: a run computes the same wherever it is sent.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from impl.errors import ConfigError
from impl.harness.spec import Frozen, parse
from impl.projection import hardware


class Site(Frozen):
    """The ``slurm`` section of the workflow's configuration (``slurm/site.yaml``).

    hardware: a file of ``experiments/hardware``: devices of a node, and what a job asks for each.
    account, partition: of ``sbatch``; without them Slurm's defaults.
    gres: what this Slurm calls such a device, for example ``gpu`` or ``gpu:h100``; None on nodes without devices.
    nodes: the most that one job may have.
    """

    hardware: str
    account: str | None = None
    partition: str | None = None
    gres: str | None = Field(default="gpu", pattern=r"^[A-Za-z0-9_]+(:[A-Za-z0-9_.]+)?$")
    nodes: int = Field(default=1, gt=0)

    @property
    def submission(self) -> dict[str, str]:
        """Resources of every job, in the words of Snakemake's Slurm executor."""
        asked = {"slurm_account": self.account, "slurm_partition": self.partition}
        return {name: value for name, value in asked.items() if value is not None}


class Settings(Frozen):
    """The workflow's configuration: what ``--config`` and configuration files may set.

    hardware: a file of ``experiments/hardware`` that jobs must fit; default is ``slurm.hardware``, else the tier's.
    fit: whether a sweep with a job that cannot fit is refused before it starts.
    """

    tier: str = "laptop"
    hardware: str | None = None
    fit: bool = True
    slurm: Site | None = None


@dataclass(frozen=True)
class Request:
    """What one job asks for.

    ranks: processes on each node.  cpus, memory_mb: of one node.  gres: devices of one node, '' for none.
    """

    nodes: int
    ranks: int
    cpus: int
    memory_mb: int
    minutes: int
    gres: str


@dataclass(frozen=True)
class Cluster:
    """A site and its hardware."""

    site: Site
    name: str
    devices: int
    jobs: hardware.JobSpec

    def request(self, ranks: int, experiment: str) -> Request:
        """Return what a job of ``ranks`` processes, one a device, asks for; its time limit is the ``experiment``'s.

        Nodes are filled one after the other, all with as many ranks.  Raises :class:`ConfigError` if that cannot be.
        """
        nodes = -(-ranks // self.devices)
        if ranks % nodes:
            raise ConfigError(
                f"{experiment}: {ranks} ranks do not fill {nodes} nodes of {self.devices} devices ({self.name}) "
                f"evenly: ask for a multiple of {self.devices} ranks"
            )
        if nodes > self.site.nodes:
            raise ConfigError(
                f"{experiment}: a job of {ranks} ranks needs {nodes} nodes of {self.name}, slurm.nodes is "
                f"{self.site.nodes}: raise it in slurm/site.yaml or choose a smaller tier"
            )
        each = ranks // nodes
        return Request(
            nodes=nodes,
            ranks=each,
            cpus=each * self.jobs.cpus,
            memory_mb=each * self.jobs.memory_mb,
            minutes=self.jobs.minutes.get(experiment, self.jobs.minutes["default"]),
            gres=f"{self.site.gres}:{each}" if self.site.gres else "",
        )


def settings(config: dict[str, Any]) -> Settings:
    """Return Snakemake's ``config``, checked; raises :class:`ConfigError`."""
    try:
        return parse(Settings, config)
    except ConfigError as error:
        raise ConfigError(f"--config or slurm/site.yaml: {error}") from None


def cluster(site: Site, folder: Path = hardware.FOLDER) -> Cluster:
    """Return the cluster of ``site``, with its hardware file from ``folder``; raises :class:`ConfigError`."""
    spec = hardware.load_kind(site.hardware, folder)
    if spec.jobs is None:
        raise ConfigError(f"{folder / site.hardware}.yaml has no section jobs: write what a job asks for each device")
    return Cluster(site, site.hardware, spec.node.devices, spec.jobs)


def use_own_squeue(root: Path) -> None:
    """Let this process and its children find ``workflows/scripts/slurm/squeue`` of the project ``root`` first.

    The environment is the only way to tell Snakemake's executor: it runs ``squeue`` by its name.
    """
    folder = str(root.resolve() / "workflows" / "scripts" / "slurm")
    known = os.environ.get("PATH", "").split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([folder, *(path for path in known if path != folder)])
