from __future__ import annotations

import time

import pytest
import torch

from impl.canzona.clock import Clock


def test_a_moment_is_charged_once_and_to_the_innermost_phase() -> None:
    clock = Clock(torch.device("cpu"))
    with clock("forward"):
        assert clock.phase == "forward"
        time.sleep(0.01)
        with clock("param_sync"):
            assert clock.phase == "param_sync"
            time.sleep(0.02)
        time.sleep(0.01)
    time.sleep(0.01)
    with clock("backward"):
        pass
    seconds = clock.seconds()
    assert seconds["forward"] >= 0.02
    assert seconds["param_sync"] >= 0.02
    named = sum(value for phase, value in seconds.items() if phase != "iteration")
    assert named + 0.01 <= seconds["iteration"] + 1e-9, "what is in no phase is in the iteration only"
    clock.reset()
    assert clock.seconds() == {"iteration": 0.0}


def test_a_phase_ends_when_its_body_raises() -> None:
    clock = Clock(torch.device("cpu"))
    with pytest.raises(KeyError), clock("forward"):
        raise KeyError
    assert clock.phase == ""
