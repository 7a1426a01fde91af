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


def slots(prompt: int, room: int, beams: int = 1) -> int:
    """Returns how many slots a prompt and answers of `room` tokens need, the last of which is not read.

    It is a multiple of 16, since products over other widths are slower.
    """
    return -(-(prompt + beams * (room - 1)) // 16) * 16


def growing_loop(stages: list[int], prompt: int, beams: int = 1) -> Callable[..., Any]:
    """Returns what `jax.lax.while_loop` is to a search, with a cache that grows on the way.

    Beams leave slots behind which are no beam's past any longer, and so do sentences which are done. As a stage begins,
    and when it is full, these are freed, and it goes on if half of its room is free then; where beams soon have most of
    their past in common, as those of a trained model do, few searches need the later stages. The last stage has room
    for all without that.

    The state of the search has a `cache` with the slots of `layers.cache.Cache`, and with beams `searching_R`.

    Args:
      stages: for how many tokens of an answer each has room if nothing is freed (`rooms`).
      prompt: slots in front of the answers.
      beams: rows which share an entry of the cache; each step takes as many slots.
    """

    def loop(going_on: Callable[[Any], jax.Array], advance: Callable[[Any], Any], state: Any) -> Any:
        def fits(state):
            return going_on(state) & (state.cache.filled + beams <= state.cache.capacity)

        def lasts(state):
            needed, capacity = state.cache.needed(state.searching_R), state.cache.capacity
            return going_on(state) & (needed + max(beams, (capacity - prompt) // 2) <= capacity)

        def free_and_fill(state):
            state = dataclasses.replace(state, cache=state.cache.pack(state.searching_R))
            return jax.lax.while_loop(fits, advance, state)

        def grown(state, room):
            return dataclasses.replace(state, cache=state.cache.grow(slots(prompt, room, beams)))

        *earlier, last = stages
        for room in earlier:
            state = grown(state, room)
            if beams > 1:
                state = jax.lax.while_loop(lasts, free_and_fill, state)
            else:
                state = jax.lax.while_loop(fits, advance, state)
        # Were there no room after all, the cache would say so (`Cache.overflow`).
        return jax.lax.while_loop(going_on, advance, grown(state, last))

    return loop
