"""Agreement between the processes of one run, so that all restore the same step or none does."""

from __future__ import annotations

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
    """Whether this process is the one which writes manifests and deletes old steps."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits for every process to arrive here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def all_true(value: bool) -> bool:
    """Returns whether `value` is true on every process; each of them must call it."""
    if jax.process_count() == 1:
        return value
    return bool(np.all(multihost_utils.process_allgather(np.asarray(value))))


def same_everywhere(values: list[int]) -> list[int]:
    """Returns the first process's list of non-negative numbers, on every process."""
    if jax.process_count() == 1:
        return values
    count = int(multihost_utils.broadcast_one_to_all(np.asarray(len(values), np.int32)))
    padded = np.resize(np.asarray(values or [0], np.int32), count)
    return [int(value) for value in multihost_utils.broadcast_one_to_all(padded)]
