"""Whether predictions are as near the measurements as the validation experiment asks: one answer for all who say it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

METHODS = ("timeline", "replay")
"""How something is predicted: from kernels, or by running the slowest rank's own share."""
JUDGED = ("iteration", "optimizer_step", "update")
"""Quantities that the limit of the timeline is about: of pipelines ``update``; forward and backward are parts."""


@dataclass(frozen=True)
class Verdict:
    """How far the judged predictions are off: median and largest size of ``count`` errors, and the limit."""

    count: int
    median: float
    largest: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the median is within the limit."""
        return self.median <= self.limit

    def __str__(self) -> str:
        return f"median error {self.median:.1%}, largest {self.largest:.1%}, over {self.count}"


def judged_errors(frame: pd.DataFrame, method: str) -> pd.DataFrame:
    """Return the rows of a validation table that the limit of ``method``, one of :data:`METHODS`, is about."""
    mine = (frame["method"] == method) & frame["quantity"].isin(list(JUDGED)) & (frame["status"] == "done")
    return frame.loc[mine & frame["error"].notna()]


def verdict(frame: pd.DataFrame, method: str) -> Verdict | None:
    """Return whether the limit of ``method`` holds in ``frame``; None if nothing was compared."""
    errors = np.abs(judged_errors(frame, method)["error"].to_numpy(dtype=float))
    if not errors.size:
        return None
    limit = frame["replay_limit" if method == "replay" else "limit"].to_numpy(dtype=float)[0]
    return Verdict(len(errors), float(np.median(errors)), float(errors.max()), float(limit))
