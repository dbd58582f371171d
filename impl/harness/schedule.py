"""The learning rate of a step."""

from __future__ import annotations

import math

from impl.harness.spec import ScheduleSpec


def learning_rate(schedule: ScheduleSpec, peak: float, step: int, steps: int) -> float:
    """Return the learning rate of 1-based ``step`` of ``steps``.

    Linear warm-up reaches ``peak`` at step ``warmup_steps``, or at step 1 without warm-up; then half a cosine reaches
    ``final_fraction * peak`` at the last step.  A run that is no longer than its warm-up has no cosine part.
    """
    top = max(schedule.warmup_steps, 1)
    if step <= top:
        return peak * step / top
    low = schedule.final_fraction
    return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * (step - top) / (steps - top))))
