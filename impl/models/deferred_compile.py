"""Lets an import decorate functions with ``torch.compile`` without starting the compiler.

``torch.compile`` loads dynamo and inductor when it decorates, 1.6 of the 4.3 CPU seconds that a rank needs to start,
although none of the functions that megatron-core decorates is called here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

Function = Callable[..., Any]


@contextlib.contextmanager
def deferred_compile() -> Iterator[None]:
    """Inside, ``torch.compile`` returns a function that is compiled, with the same options, when it is first called.

    For decorated functions, not for modules.  Not to be used from several threads.
    """
    compile_now = torch.compile

    def later(function: Function | None = None, **options: Any) -> Function:
        if function is None:
            return functools.partial(later, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    torch.compile = later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now
