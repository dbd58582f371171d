"""What a projection experiment depends on beside its settings: hardware files, and a kernel table if it names one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from impl.errors import ConfigError
from impl.harness.spec import load_yaml
from impl.harness.tiers import canonical_digest
from impl.projection import hardware


def digest(path: str | Path, root: Path) -> str:
    """Return a hash of what is in the hardware files and the kernel table that the experiment in ``path`` names.

    root: folder of the project, to which a kernel table's path is relative.  Comments in hardware files, and what jobs
        ask a batch system for, do not count.
    Raises :class:`ConfigError` if one is not known or cannot be read.
    """
    data = load_yaml(Path(path))
    known = hardware.names()
    kinds = {name if name in known else hardware.split(name)[0] for name in _hardware(data)}
    found: dict[str, Any] = {}
    for kind in kinds:
        described = load_yaml(hardware.FOLDER / f"{kind}.yaml")
        found[kind] = {k: v for k, v in described.items() if k != "jobs"} if isinstance(described, dict) else described
    table = data.get("kernels") if isinstance(data, dict) else None
    if table is not None:
        try:
            found["kernels"] = hashlib.sha256((root / str(table)).read_bytes()).hexdigest()
        except OSError as error:
            raise ConfigError(f"{path}: cannot read kernels {table}: {error.strerror}") from None
    return canonical_digest(found)


def _hardware(data: Any) -> Iterator[str]:
    """Yield the names under any key ``hardware``, of kinds or with a number of devices."""
    if isinstance(data, list):
        for item in data:
            yield from _hardware(item)
    elif isinstance(data, dict):
        for key, value in data.items():
            if key != "hardware":
                yield from _hardware(value)
            else:
                yield from map(str, value if isinstance(value, list) else [value])
