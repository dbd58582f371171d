"""The plan: who reduces, owns, hosts and updates what.  Frozen data that everything downstream consumes.

A plan is made once, before any process starts, from shapes alone; it is printed, validated, executed by the engine and
costed by the projection.  The four DP x TP systems differ only in their plan.  Positions are in elements of the flat
buffer that one tensor-parallel rank holds (all of its TP ranks have the same layout).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from impl.models.parameters import Fragment, ParamSpec

EVERY = -1
"""Owner or host of work that every rank repeats (synchronous compute)."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the flat buffer.

    owner: the DP rank that updates it, EVERY, or None where the bucket's cuts divide it (elementwise ZeRO-1).
    """

    parameter: int
    start: int
    end: int
    owner: int | None


@dataclass(frozen=True)
class Bucket:
    """A range of the flat buffer that is reduced and gathered together.

    start, end: the range, padding at its end included.
    slots: the parameters inside, by rising position.
    cuts: ``dp + 1`` rising positions; rank r holds ``[cuts[r], cuts[r + 1])`` after a reduce-scatter.  Empty for an
        all-reduced bucket, which every rank holds whole.
    """

    start: int
    end: int
    slots: tuple[Slot, ...]
    cuts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Piece:
    """A range of one parameter that one DP rank updates; positions in the flat buffer."""

    parameter: int
    start: int
    end: int


@dataclass(frozen=True)
class Family:
    """The parameters of one optimizer, in a flat buffer of their own.

    atomic: its tensors may not be cut.
    reduction: what happens to the gradients of a bucket during backward.
    synchronization: how updated parameters reach the other DP ranks: an all-gather per bucket that the forward waits
        for, one blocking all-gather after the step, or none because every rank computed everything.
    """

    name: str
    optimizer: str
    atomic: bool
    reduction: Literal["reduce-scatter", "all-reduce"]
    synchronization: Literal["per-bucket", "once", "none"]
    buckets: tuple[Bucket, ...]

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.buckets[-1].end if self.buckets else 0

    @property
    def slots(self) -> Iterator[Slot]:
        """All slots by rising position."""
        return (slot for bucket in self.buckets for slot in bucket.slots)

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """What DP rank ``rank`` updates, by rising position."""
        owned = ((slot, owned_range(bucket, slot, rank)) for bucket in self.buckets for slot in bucket.slots)
        return tuple(Piece(slot.parameter, *span) for slot, span in owned if span)


def owned_range(bucket: Bucket, slot: Slot, rank: int) -> tuple[int, int] | None:
    """Return the part of ``slot`` that DP rank ``rank`` updates, or None; positions in the flat buffer."""
    if slot.owner is None:
        low, high = max(slot.start, bucket.cuts[rank]), min(slot.end, bucket.cuts[rank + 1])
        return (low, high) if low < high else None
    return (slot.start, slot.end) if slot.owner in (rank, EVERY) else None


@dataclass(frozen=True)
class MicroGroup:
    """Matrices of one DP rank whose shards are gathered, updated and scattered together over the TP group.

    hosts: for each parameter the TP rank that computes its update, or EVERY.
    over_capacity: a single matrix larger than the capacity, which gets a group of its own.
    """

    parameters: tuple[int, ...]
    hosts: tuple[int, ...]
    over_capacity: bool = False


@dataclass(frozen=True)
class Plan:
    """A complete assignment for a ``dp`` x ``tp`` mesh.

    strategy, version: the rule that made it (``version`` names the NV-layerwise release, else None).
    parameters: all trainable parameters in registration order, blocks of a split one in its place; everything else
        refers to them by index.
    micro_groups: for each DP rank its groups, in the order in which they run.
    options: the settings that led here, for the record.
    fallback_used: the balanced plan was not strictly better, so the start-index plan was kept.
    """

    strategy: str
    version: str | None
    dp: int
    tp: int
    parameters: tuple[ParamSpec, ...]
    families: tuple[Family, ...]
    micro_groups: tuple[tuple[MicroGroup, ...], ...]
    options: dict[str, Any]
    fallback_used: bool = False

    def family(self, name: str) -> Family:
        """Return the family ``name`` (``matrix`` or ``elementwise``)."""
        return next(f for f in self.families if f.name == name)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; :meth:`from_json` is its inverse."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Rebuild a plan from :meth:`to_json`'s data."""
        parameters = tuple(
            ParamSpec(
                **{k: p[k] for k in ("name", "tp_dim", "partial_over_tp", "part_of", "first")},
                shape=tuple(p["shape"]),
                blocks=tuple(p["blocks"]),
                fragments=tuple(Fragment(f["name"], tuple(map(tuple, f["rows"]))) for f in p["fragments"]),
            )
            for p in data["parameters"]
        )
        families = tuple(
            Family(
                **{k: f[k] for k in ("name", "optimizer", "atomic", "reduction", "synchronization")},
                buckets=tuple(
                    Bucket(b["start"], b["end"], tuple(Slot(**s) for s in b["slots"]), tuple(b["cuts"]))
                    for b in f["buckets"]
                ),
            )
            for f in data["families"]
        )
        groups = tuple(
            tuple(MicroGroup(tuple(g["parameters"]), tuple(g["hosts"]), g["over_capacity"]) for g in rank)
            for rank in data["micro_groups"]
        )
        fields = {k: data[k] for k in ("strategy", "version", "dp", "tp", "options", "fallback_used")}
        return cls(parameters=parameters, families=families, micro_groups=groups, **fields)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the plan; ranks compare it before they start."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()


class PlanError(ValueError):
    """A plan that breaks an invariant: a bug in a planner, never the user's fault."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)


def validate(plan: Plan) -> None:
    """Raise :class:`PlanError` unless ``plan`` is complete and executable.

    Buckets tile the buffer, slots lie inside their bucket without overlap and have the shard's size, segments tile
    every reduce-scattered bucket, nothing atomic is cut and its owner holds it whole, every parameter is in exactly one
    family, and every owned matrix that TP cuts has exactly one host (or every rank) in exactly one micro-group.
    """
    seen: set[int] = set()
    for family in plan.families:
        _check(
            not (family.atomic and family.reduction == "reduce-scatter" and family.synchronization == "none"),
            f"{family.name}: reduce-scattered parameters must be synchronized",
        )
        position = 0
        for number, bucket in enumerate(family.buckets):
            where = f"{family.name} bucket {number}"
            _check(bucket.start == position and bucket.end > bucket.start, f"{where}: buckets do not tile the buffer")
            _check(bool(bucket.slots), f"{where} is empty")
            position = bucket.end
            _check_segments(plan, family, bucket, where)
            at = bucket.start
            for slot in bucket.slots:
                spec = plan.parameters[slot.parameter]
                _check(slot.parameter not in seen, f"{spec.name} has two slots")
                seen.add(slot.parameter)
                _check(at <= slot.start and slot.end <= bucket.end, f"{where}: {spec.name} overlaps or sticks out")
                _check(slot.end - slot.start == spec.local_numel(plan.tp), f"{where}: {spec.name} has the wrong size")
                at = slot.end
                _check_owner(plan, family, bucket, slot)
    _check(len(seen) == len(plan.parameters), "some parameters are in no family")
    _check_micro_groups(plan)


def _check_segments(plan: Plan, family: Family, bucket: Bucket, where: str) -> None:
    if family.reduction == "all-reduce":
        _check(not bucket.cuts, f"{where}: an all-reduced bucket has no cuts")
        return
    cuts = bucket.cuts
    _check(len(cuts) == plan.dp + 1 and cuts[0] == bucket.start, f"{where}: needs dp + 1 cuts from its start")
    _check(all(a <= b for a, b in pairwise(cuts)), f"{where}: cuts fall")
    last = bucket.slots[-1].end if bucket.slots else bucket.start
    _check(last <= cuts[-1] <= bucket.end, f"{where}: segments do not cover the bucket")


def _check_owner(plan: Plan, family: Family, bucket: Bucket, slot: Slot) -> None:
    name = plan.parameters[slot.parameter].name
    if slot.owner is None:
        _check(not family.atomic and bool(bucket.cuts), f"{name} is atomic but has no owner")
    elif slot.owner == EVERY:
        _check(family.reduction == "all-reduce", f"{name}: every rank owns it but its gradient is scattered")
    else:
        _check(0 <= slot.owner < plan.dp, f"{name}: owner {slot.owner} is not a DP rank")
        if bucket.cuts:
            low, high = bucket.cuts[slot.owner], bucket.cuts[slot.owner + 1]
            _check(low <= slot.start and slot.end <= high, f"{name} is cut: its owner does not hold it whole")


def _check_micro_groups(plan: Plan) -> None:
    _check(len(plan.micro_groups) == plan.dp, "micro-groups are needed for every DP rank")
    home = {slot.parameter: family.name for family in plan.families for slot in family.slots}
    for rank, groups in enumerate(plan.micro_groups):
        due = {p.parameter for f in plan.families if f.atomic for p in f.pieces(rank)}
        listed = [p for group in groups for p in group.parameters]
        _check(len(listed) == len(set(listed)), f"DP rank {rank}: a matrix is in two micro-groups")
        _check(set(listed) == due, f"DP rank {rank}: micro-groups and owned matrices differ")
        for group in groups:
            _check(len(group.parameters) == len(group.hosts) > 0, f"DP rank {rank}: every matrix needs one host")
            families = {home[parameter] for parameter in group.parameters}
            _check(len(families) == 1, f"DP rank {rank}: a micro-group mixes {families}")
            for parameter, host in zip(group.parameters, group.hosts, strict=True):
                whole = plan.parameters[parameter].tp_dim is None or plan.tp == 1
                ok = host in (0, EVERY) if plan.tp == 1 else (host == EVERY if whole else EVERY <= host < plan.tp)
                _check(ok, f"{plan.parameters[parameter].name}: {host} is no host on TP={plan.tp}")
