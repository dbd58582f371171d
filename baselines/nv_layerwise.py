"""NVIDIA's layer-wise distributed optimizer (Megatron-LM), in its three published versions.

``ping-pong`` (January 2026, megatron-core 0.16): gradients are all-reduced; all parameters of all optimizers, smallest
first, are dealt to DP ranks to and fro; one all-gather of parameters after the step.
``lpt-numel`` (May 2026, 0.18 and 0.19): each bucket is packed into equal padded shards of whole matrices, largest first
onto the emptiest shard, so that plain reduce-scatter and all-gather work.
``lpt-ns`` (August 2026, pull requests 5415 and 6379): the same by Newton-Schulz cost with loads that carry over from
bucket to bucket, and a bucket that is full takes more matrices as long as they fit into its padding.

In all of them every tensor-parallel rank repeats the computation of its DP rank's matrices (mode ``duplicated``), the
one exact mode that all versions have.  Elementwise parameters are under ZeRO-1 in the two packed versions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from impl.canzona.families import all_reduced, assemble, owned_matrices, scattered, zero1
from impl.canzona.layout import ALIGNMENT, bucket_divisor, equal_cuts, own_whole, round_up
from impl.canzona.plan import Bucket, Plan, Slot
from impl.canzona.strategies import Problem, strategy
from impl.canzona.tp_groups import micro_groups
from impl.models.parameters import ParamSpec

FILL = 0.9
"""A bucket is not closed before it holds this share of what its largest matrix makes it occupy on all ranks."""
SLACK = 1.3
"""A shard may hold this multiple of the mean before cost gives way to size (``lpt-ns``)."""


@strategy("nv-layerwise")
def plan_nv_layerwise(problem: Problem) -> Plan:
    """Return the plan of the version that ``options.nv_version`` names."""
    version = problem.options.nv_version
    if version == "ping-pong":
        families = all_reduced(problem, ping_pong(problem), "once")
    else:
        families = scattered(problem, _packed(problem, version), atomic=True) + zero1(problem)
    groups = micro_groups(problem, owned_matrices(families, problem.dp), "every")
    return assemble("nv-layerwise", problem, families, groups, version=version)


def ping_pong(problem: Problem) -> dict[int, int]:
    """Return the owner of every parameter: by rising size of its shard, dealt to ranks 0..n-1, n-1..0, 0..n-1, ...

    Equal sizes keep the order of the optimizers' parameter lists: matrices first, each list in registration order.
    """
    order = [*problem.members(atomic=True), *problem.members(atomic=False)]
    order.sort(key=lambda i: problem.parameters[i].local_numel(problem.tp))
    there_and_back = [*range(problem.dp), *reversed(range(problem.dp))]
    return {index: there_and_back[i % len(there_and_back)] for i, index in enumerate(order)}


@dataclass(frozen=True)
class Matrix:
    """A matrix as the packers see it: its index, and size and cost of the shard that one rank holds."""

    index: int
    numel: int
    cost: int


def newton_schulz_cost(spec: ParamSpec, tp: int) -> int:
    """Return Megatron's estimate ``max(m, n) * min(m, n)^2`` on the tensor-parallel shard; elements if not a matrix."""
    shape = spec.local_shape(tp)
    return max(shape) * min(shape) ** 2 if len(shape) == 2 else spec.local_numel(tp)


def _packed(problem: Problem, version: str) -> tuple[Bucket, ...]:
    matrices = [
        Matrix(i, problem.parameters[i].local_numel(problem.tp), newton_schulz_cost(problem.parameters[i], problem.tp))
        for i in reversed(problem.members(atomic=True))
    ]
    size = problem.options.bucket_size(problem.dp)
    if version == "lpt-numel":
        packed = [pack_by_size(chunk, problem.dp) for chunk in closing_chunks(matrices, size, problem.dp)]
    else:
        carried = [0] * problem.dp
        packed = [pack_by_cost(chunk, carried) for chunk in absorbing_chunks(matrices, size, problem.dp)]
    buckets: list[Bucket] = []
    for shards in packed:
        buckets.append(shards_to_bucket(shards, start=buckets[-1].end if buckets else 0))
    return tuple(buckets)


def closing_chunks(matrices: Sequence[Matrix], bucket_elements: int, dp: int) -> list[list[Matrix]]:
    """Return the buckets' contents, each closed by the matrix that brings it to its size (0.18, 0.19)."""
    chunks: list[list[Matrix]] = [[]]
    for matrix in matrices:
        if chunks[-1] and sum(m.numel for m in chunks[-1]) >= _threshold(chunks[-1], bucket_elements, dp):
            chunks.append([])
        chunks[-1].append(matrix)
    return [c for c in chunks if c]


def absorbing_chunks(matrices: Sequence[Matrix], bucket_elements: int, dp: int) -> list[list[Matrix]]:
    """Return the buckets' contents where a full bucket goes on as long as matrices fit into its padding (#5415).

    Whether one fits is judged by an estimate that places matrices in their order of arrival on the emptiest shard.
    """
    chunks: list[list[Matrix]] = [[]]
    shards = [0] * dp
    for matrix in matrices:
        chunk = chunks[-1]
        if chunk and sum(m.numel for m in chunk) >= _threshold(chunk, bucket_elements, dp):
            room = round_up(max(shards), _shard_divisor(dp))
            if round_up(min(shards), ALIGNMENT) + matrix.numel > room:
                chunks.append([])
                shards = [0] * dp
        emptiest = shards.index(min(shards))
        shards[emptiest] = round_up(shards[emptiest], ALIGNMENT) + matrix.numel
        chunks[-1].append(matrix)
    return [c for c in chunks if c]


def pack_by_size(chunk: Sequence[Matrix], dp: int) -> list[list[Matrix]]:
    """Return for each rank its matrices: largest first, each onto the emptiest shard."""
    shards: list[list[Matrix]] = [[] for _ in range(dp)]
    filled = [0] * dp
    for matrix in sorted(chunk, key=lambda m: -m.numel):
        rank = filled.index(min(filled))
        filled[rank] = round_up(filled[rank], ALIGNMENT) + matrix.numel
        shards[rank].append(matrix)
    return shards


def pack_by_cost(chunk: Sequence[Matrix], carried: list[int]) -> list[list[Matrix]]:
    """Return for each rank its matrices: costliest first, onto the rank with least cost so far (#6379).

    Only ranks whose shard stays within ``SLACK`` times the chunk's mean are considered; if there is none, the emptiest
    shard takes it.  ``carried`` holds the cost per rank over all buckets and is brought up to date in place.
    """
    dp = len(carried)
    shards: list[list[Matrix]] = [[] for _ in range(dp)]
    filled = [0] * dp
    limit = sum(m.numel for m in chunk) / dp * SLACK
    for matrix in sorted(chunk, key=lambda m: -m.cost):
        open_ranks = [r for r in range(dp) if round_up(filled[r], ALIGNMENT) + matrix.numel <= limit]
        rank = min(open_ranks, key=carried.__getitem__) if open_ranks else filled.index(min(filled))
        filled[rank] = round_up(filled[rank], ALIGNMENT) + matrix.numel
        carried[rank] += matrix.cost
        shards[rank].append(matrix)
    return shards


def shards_to_bucket(shards: Sequence[Sequence[Matrix]], start: int) -> Bucket:
    """Return the bucket from position ``start`` on with one shard per rank, all padded to the fullest one."""
    offsets = [list(_offsets(shard)) for shard in shards]
    size = round_up(max(o[-1][1] for o in offsets if o), _shard_divisor(len(shards)))
    slots = tuple(
        Slot(matrix.index, start + rank * size + low, start + rank * size + high, None)
        for rank, shard in enumerate(shards)
        for matrix, (low, high) in zip(shard, offsets[rank], strict=True)
    )
    bucket = Bucket(start, start + len(shards) * size, slots)
    return own_whole(bucket, equal_cuts(bucket, len(shards)))


def _offsets(shard: Sequence[Matrix]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    end = 0
    for matrix in shard:
        low = round_up(end, ALIGNMENT)
        end = low + matrix.numel
        out.append((low, end))
    return out


def _threshold(chunk: Sequence[Matrix], bucket_elements: int, dp: int) -> int:
    return max(bucket_elements, int(dp * max(m.numel for m in chunk) * FILL))


def _shard_divisor(dp: int) -> int:
    return math.lcm(ALIGNMENT, bucket_divisor(dp) // dp)
