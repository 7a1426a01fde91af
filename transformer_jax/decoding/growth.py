"""Loops whose cache grows with the answer, so that a step's cost follows what is filled and not what may come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

_SHORTEST = 64


def rooms(capacity: int) -> list[int]:
    """Returns for how many new tokens the cache has room, stage after stage; the last time for `capacity`.

    Each stage has twice the room of the one before, so attention reads at most about twice what is filled. Below 64
    tokens a stage would cost more time to compile than it saves.
    """
    stages = [capacity]
    while stages[0] >= 2 * _SHORTEST:
        stages.insert(0, -(-stages[0] // 2))
    return stages


def growing_loop(capacity: int, grow_fn: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """Returns what `jax.lax.while_loop` is to a search, with a cache that grows on the way.

    Args:
      capacity: most tokens of an answer.
      grow_fn: `cache, room -> cache` with room for so many new tokens in all.
    """

    def loop(going_on, advance, state):
        for room in rooms(capacity):
            state = dataclasses.replace(state, cache=grow_fn(state.cache, room))
            # The last token of a stage is read in the next one, or never.
            state = jax.lax.while_loop(lambda s, room=room: going_on(s) & (s.generated < room), advance, state)
        return state

    return loop
