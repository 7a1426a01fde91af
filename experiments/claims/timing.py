"""Seconds of a compiled function, by its fastest calls: what other work on the machine adds is left out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax


def seconds(function: Callable[..., Any], *arguments: Any, calls: int = 7) -> float:
    """Returns the least time of several calls, after one which compiles."""
    jax.block_until_ready(function(*arguments))
    found = []
    for _ in range(calls):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        found.append(time.perf_counter() - begin)
    return min(found)
