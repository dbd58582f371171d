"""The files ``experiments/optimizers/NAME.yaml``: an optimizer's settings, and the experiments that it takes part in.

An experiment names optimizers of its own; a file adds its optimizer to others, so that a new one appears in their
tables without a change of theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from impl.errors import ConfigError, unknown
from impl.harness.spec import Frozen, RunSpec, load_yaml, parse
from impl.harness.tiers import Id, Label, merged

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "optimizers"
OWN_KIND = {"balance": "optimizers", "projection": "optimizers", "scaling": "optimizers"}
"""Experiments without ``kind`` that compare optimizers, and the setting that lists them."""
LISTS = {"step-time": "optimizers", "precision": "optimizers", "pipeline": "methods"}
"""The setting that lists what is compared, by ``kind`` of experiment."""


class OptimizerEntry(Label):
    """An optimizer of matrices in an experiment.

    id: its name in the registry; settings: its hyper-parameters.
    lr: of its runs; base: their other settings.  Both go over those of the experiment and its tier.
    """

    settings: dict[str, Any] = Field(default_factory=dict)
    lr: float | None = Field(default=None, gt=0)
    base: dict[str, Any] = Field(default_factory=dict)

    def over(self, base: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a run: ``base`` with this optimizer."""
        own = {"optimizer": self.id, "optimizer_settings": self.settings} | ({"lr": self.lr} if self.lr else {})
        return merged({**base, "optimizer_settings": {}}, self.base, own)


class OptimizerFile(Frozen):
    """One file.

    settings: hyper-parameters as the experiments use them.
    experiments: experiments that this optimizer is added to, by name, each with what an entry may have there:
        ``settings`` (over those above), ``lr`` and ``base``; nothing is fine.
    """

    name: Id
    display_name: str
    settings: dict[str, Any] = Field(default_factory=dict)
    experiments: dict[str, dict[str, Any] | None] = Field(default_factory=dict)

    def entry(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return this optimizer's entry of an experiment, ``own`` settings first, as plain data."""
        return {"id": self.name, "name": self.display_name} | merged({"settings": self.settings}, own)


def read(folder: Path = FOLDER) -> dict[str, OptimizerFile]:
    """Return the files of ``folder`` by name, none if there is no such folder.

    Raises :class:`ConfigError` that names the file.
    """
    found = {}
    for path in sorted(folder.glob("*.yaml")):
        try:
            found[path.stem] = parse(OptimizerFile, load_yaml(path))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        if found[path.stem].name != path.stem:
            raise ConfigError(f"{path}: name must be that of the file, {path.stem}, got {found[path.stem].name!r}")
    return found


def with_optimizers(path: Path, data: Any) -> Any:
    """Return the plain ``data`` of the experiment in ``path`` with the optimizers of the files beside it.

    Names in its ``optimizers`` become entries with the settings of their file, and optimizers whose file names this
    experiment are added.  Data that lists no optimizers or methods are returned as they are.

    Raises :class:`ConfigError` for an unknown optimizer, and for a file that names an unknown experiment.
    """
    where = _list_of(path.stem, data)
    if where is None:
        return data
    files = read(path.parent / "optimizers")
    for file in files.values():
        _check_names(file, path.parent)
    listed = data.get(where) or []
    if where == "optimizers":
        listed = [_expanded(entry, files) for entry in listed]
    here = [file for file in files.values() if path.stem in file.experiments]
    added = [_addition(file, where, file.experiments[path.stem]) for file in here]
    if added and not listed and isinstance(data.get("base"), dict):  # what it compares by itself stays
        data = {**data, "base": {"optimizer": RunSpec.model_fields["optimizer"].default, **data["base"]}}
    return {**data, where: [*listed, *added]} if listed or added else data


def _list_of(name: str, data: Any) -> str | None:
    if not isinstance(data, dict):
        return None
    return LISTS.get(str(data["kind"])) if "kind" in data else OWN_KIND.get(name)


def _expanded(entry: Any, files: dict[str, OptimizerFile]) -> Any:
    own = {"id": entry} if isinstance(entry, str) else entry
    if not isinstance(own, dict) or "id" not in own:
        raise ConfigError(f"optimizers: write a name or a mapping with id, got {entry!r}")
    if own["id"] in files:
        return files[own["id"]].entry(own)
    if isinstance(entry, str):
        raise unknown("optimizer", entry, files)
    return own


def _addition(file: OptimizerFile, where: str, own: dict[str, Any] | None) -> dict[str, Any]:
    entry = file.entry(own or {})
    if where == "methods":
        rates = entry.get("lr", [])
        entry |= {"method": file.name, "lr": rates if isinstance(rates, list) else [rates]}
    return entry


def _check_names(file: OptimizerFile, folder: Path) -> None:
    known = {path.stem: path for path in folder.glob("*.yaml")}
    for name in file.experiments:
        if name not in known:
            raise unknown(f"experiment in optimizers/{file.name}.yaml", name, known)
        if _list_of(name, load_yaml(known[name])) is None:
            raise ConfigError(f"optimizers/{file.name}.yaml: {name}.yaml is no experiment that compares optimizers")
