"""An independent count of collectives: everything that reaches torch.distributed, by phase and process group.

The ledger counts what the engine says that it sends.  The audit sees every c10d call of the thread, whoever made it
(Megatron's tensor-parallel layers too), so it can prove that a phase is silent.  It intercepts every operator and is
slow: the training loop runs it over one step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from impl.canzona.mesh import Mesh


class Audit(TorchDispatchMode):
    """Context in which c10d calls are counted.

    phase: returns the phase that is running.
    groups: name of each known process group (``ProcessGroup.group_name``) -> its label.
    """

    def __init__(self, phase: Callable[[], str], groups: Mapping[str, str]) -> None:
        super().__init__()
        self._phase = phase
        self._groups = groups
        self._seen: dict[str, dict[str, dict[str, int]]] = defaultdict(dict)

    @classmethod
    def of_mesh(cls, mesh: Mesh, phase: Callable[[], str]) -> Audit:
        """Return an audit that labels the groups of ``mesh`` as ``dp``, ``tp`` and ``world``; others are ``other``."""
        groups = ((mesh.world_group, "world"), (mesh.tp_group, "tp"), (mesh.dp_group, "dp"))
        return cls(phase, {g.group_name: label for g, label in groups})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self._count(args)
        return func(*args, **(kwargs or {}))

    def _count(self, args: tuple[Any, ...]) -> None:
        label = "other"
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                try:
                    name = dist.ProcessGroup.unbox(arg).group_name
                except RuntimeError:  # a reduce op is boxed too
                    continue
                label = self._groups.get(name, "other")
        size = sum(t.numel() * t.element_size() for t in tree_iter(args) if isinstance(t, torch.Tensor))
        entry = self._seen[self._phase()].setdefault(label, {"calls": 0, "tensor_bytes": 0})
        entry["calls"] += 1
        entry["tensor_bytes"] += size

    def result(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return ``{phase: {group: {calls, tensor_bytes}}}``; tensor bytes are those of all arguments, in and out."""
        return {phase: {k: dict(v) for k, v in by.items()} for phase, by in self._seen.items()}
