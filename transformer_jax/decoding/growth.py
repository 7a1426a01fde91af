"""Loops whose cache grows with the answer, so that a step's cost follows what is filled and not what may come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

_SHORTEST, _USUAL = 16, 64


def first_room(numbers: int, parameters: int) -> int:
    """Returns for how many tokens the first stage has room at least, a power of two from 16 to 64.

    A stage takes a second or more to compile. Below 64 tokens it saves that only where a step reads about as much of
    the cache as of the matrices, so one begins where the cache has as many numbers as a quarter of the parameters.

    Args:
      numbers: which a token of every row takes in the cache.
      parameters: numbers in the model.
    """
    room = _USUAL
    while room > _SHORTEST and 4 * room * numbers > parameters:
        room //= 2
    return room


def rooms(capacity: int, first: int = _USUAL) -> list[int]:
    """Returns for how many new tokens the cache has room, stage after stage; the last time for `capacity`.

    Each stage has twice the room of the one before, so attention reads at most about twice what is filled. The first
    has room for `first` tokens or more.
    """
    stages = [capacity]
    while stages[0] >= 2 * first:
        stages.insert(0, -(-stages[0] // 2))
    return stages


def growing_loop(stages: list[int], grow_fn: Callable[[Any, int], Any]) -> Callable[..., Any]:
    """Returns what `jax.lax.while_loop` is to a search, with a cache that grows on the way.

    Args:
      stages: for how many tokens of an answer each has room (`rooms`).
      grow_fn: `cache, room -> cache` with room for so many new tokens in all.
    """

    def loop(going_on, advance, state):
        for room in stages:
            state = dataclasses.replace(state, cache=grow_fn(state.cache, room))
            # The last token of a stage is read in the next one, or never.
            state = jax.lax.while_loop(lambda s, room=room: going_on(s) & (s.generated < room), advance, state)
        return state

    return loop
