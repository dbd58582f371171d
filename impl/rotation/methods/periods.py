"""How often each stage refreshes its bases when all stages share one budget."""

from __future__ import annotations

from collections.abc import Sequence

from impl.errors import ConfigError


def rates(profile: Sequence[int], period: int, max_period: int) -> list[float]:
    """Return refreshes per update of each stage: in proportion to staleness + 1, ``P / period`` altogether.

    ``r_k = clip(c (tau_k + 1), 1 / max_period, 1)`` with the ``c`` that makes the sum ``P / period``.

    Raises :class:`ConfigError` if ``period`` is above ``max_period``.
    """
    if period > max_period:
        raise ConfigError(f"period {period} is above max_period {max_period}: raise max_period or lower period")
    budget, low, high = len(profile) / period, 0.0, 1.0
    for _ in range(200):  # the sum grows with c; bisection to the last bit
        middle = (low + high) / 2
        total = sum(_clipped(middle, profile, max_period))
        low, high = (middle, high) if total < budget else (low, middle)
    return _clipped(high, profile, max_period)


def periods(profile: Sequence[int], period: int, max_period: int, *, reverse: bool = False) -> tuple[int, ...]:
    """Return whole periods of each stage close to :func:`rates`.

    What rounding adds to or takes from the budget is carried to the next stage; a staler stage never gets less.

    reverse: give the first stage the last one's share and so on, a control.
    """
    stalest = sorted(range(len(profile)), key=lambda k: -profile[k])
    wanted, found, carried = rates(profile, period, max_period), [], 0.0
    for stage in stalest:
        rate = wanted[stage] + carried
        found.append(min(max(round(1 / rate), 1), max_period) if rate > 0 else max_period)
        carried = rate - 1 / found[-1]
    by_stage = dict(zip(stalest, sorted(found), strict=True))
    out = tuple(by_stage[stage] for stage in range(len(profile)))
    return out[::-1] if reverse else out


def _clipped(c: float, profile: Sequence[int], max_period: int) -> list[float]:
    return [min(max(c * (tau + 1), 1 / max_period), 1.0) for tau in profile]
