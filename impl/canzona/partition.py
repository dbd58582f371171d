"""Where a bucket is cut so that no matrix is: the start-index rule and the alpha-balanced greedy of Canzona."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from impl.canzona.plan import Bucket


def start_index_cuts(bucket: Bucket, dp: int) -> tuple[int, ...]:
    """Return the cuts by which rank r owns what starts inside the r-th equal share of the padded bucket.

    Canzona, equation 1: a matrix that crosses an equal cut goes whole to the lower rank, and a rank may own nothing.
    The last cut is the real end of the bucket; padding is in no segment.
    """
    share = (bucket.end - bucket.start) // dp
    cuts = [bucket.start]
    ends = iter((s.start, s.end) for s in bucket.slots)
    start, end = next(ends)
    for rank in range(dp):
        cut = cuts[-1]
        while start < bucket.start + (rank + 1) * share:
            cut = end
            start, end = next(ends, (bucket.end, bucket.end))
        cuts.append(cut)
    return tuple(cuts)


def alpha_cuts(buckets: Sequence[Bucket], dp: int, alpha: float) -> tuple[tuple[int, ...], ...]:
    """Return the cuts of every bucket by the alpha-balanced greedy (Canzona, algorithm 1).

    Buckets are visited from the largest down.  Each rank wants a mix of an even share (``alpha`` 0) and of a share in
    proportion to what it still lacks of its final load (``alpha`` 1); each cut is the parameter's end that is nearest
    to the running sum of wants, the lower one on a tie.  Loads are elements of the buffer whatever the cost model, as
    in the authors' code.  Alignment padding between parameters belongs to the segment after it.
    """
    sizes = [b.slots[-1].end - b.start for b in buckets]
    final = sum(sizes) / dp
    loads: list[float] = [0] * dp
    cuts: dict[int, tuple[int, ...]] = {}
    for i in sorted(range(len(buckets)), key=lambda i: -sizes[i]):
        total = sizes[i]
        wants = _wants(total, loads, final, alpha)
        borders = [0, *(s.end - buckets[i].start for s in buckets[i].slots)]
        cut, wanted = [0], 0.0
        for rank in range(dp - 1):
            wanted += wants[rank]
            cut.append(_nearest(borders, wanted, cut[-1]))
            loads[rank] += cut[-1] - cut[-2]
        loads[-1] += total - cut[-1]
        cuts[i] = tuple(buckets[i].start + c for c in (*cut, total))
    return tuple(cuts[i] for i in range(len(buckets)))


def _wants(total: int, loads: Sequence[float], final: float, alpha: float) -> list[float]:
    """Return how many elements of a bucket of ``total`` each rank should get."""
    even = total / len(loads)
    gaps = [max(0.0, final - load) for load in loads]
    lack = sum(gaps)
    fill = [gap / lack * total if lack > 1e-9 else even for gap in gaps]
    return [(1 - alpha) * even + alpha * f for f in fill]


def _nearest(borders: Sequence[int], wanted: float, lowest: int) -> int:
    """Return the border not below ``lowest`` (itself a border) that is nearest to ``wanted``, the lower on a tie."""
    low = bisect_left(borders, lowest)
    i = bisect_left(borders, wanted, lo=low)
    if i == len(borders):
        return borders[-1]
    if i > low and wanted - borders[i - 1] <= borders[i] - wanted:
        return borders[i - 1]
    return borders[i]
