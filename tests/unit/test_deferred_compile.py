"""Functions decorated inside the context compile when they are first called, and nothing is left behind."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from impl.models.deferred_compile import deferred_compile


def test_a_decorated_function_is_compiled_once_and_late(monkeypatch):
    calls: list[tuple[Any, dict[str, Any]]] = []

    def compile_(function: Any, **options: Any) -> Any:
        calls.append((function, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_)
    with deferred_compile():

        @torch.compile
        def plain(x: int) -> int:
            return x + 1

        @torch.compile(dynamic=True)
        def configured(x: int) -> int:
            """Twice."""
            return 2 * x

    assert torch.compile is compile_
    assert calls == []
    assert (plain(1), plain(2), configured(3)) == (2, 3, 6)
    assert [options for _, options in calls] == [{}, {"dynamic": True}]
    assert (configured.__name__, configured.__doc__) == ("configured", "Twice.")


def test_an_error_inside_leaves_torch_as_it_was():
    before = torch.compile
    with pytest.raises(ValueError, match="no"), deferred_compile():
        raise ValueError("no")
    assert torch.compile is before


def test_the_models_start_without_the_compiler():
    code = "import sys, impl.models.gpt; print('torch._inductor.compile_fx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "False"
