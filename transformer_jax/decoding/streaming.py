"""Tokens as they are generated."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.cache_api import for_decoding
from transformer_jax.decoding.generate import check_overflow, make_draws, make_step, resolve, start
from transformer_jax.decoding.growth import rooms, slots
from transformer_jax.decoding.inputs import SearchInputs, prepare
from transformer_jax.decoding.processors import Prompt
from transformer_jax.decoding.sampling import Draws, SampleState, begin, choose_next, read_last
from transformer_jax.errors import UserError
from transformer_jax.layers.cache import Cache


def stream(
    model: nn.Module, params: Any, tokens: Any, *, mask: Any = None, config: DecodeConfig | None = None, seed: int = 0
) -> Iterator[np.ndarray]:
    """Yields the next token of every row, (B,), as soon as it is chosen; `pad_id` for rows which are done.

    Greedy search and sampling only. The tokens are those of `generate` with the same arguments, which see. Per bucket
    of lengths the prompt's pass is compiled once, and the step for each size the cache has on the way (`growth.rooms`).

    Raises:
      UserError: as `generate`; and for beams or several draws, whose tokens are not known before the end.
    """
    config = resolve(model, config)
    if config.beam_size > 1 or config.num_return > 1:
        raise UserError(
            f'beam_size = {config.beam_size} and num_return = {config.num_return}: only one answer per row '
            'can be streamed; set both to 1'
        )
    inputs, static, capacity = prepare(model.config, tokens, mask, config, seed)
    return _tokens(model, params, inputs, static, capacity)


def _tokens(
    model: nn.Module, params: Any, inputs: SearchInputs, config: DecodeConfig, capacity: int
) -> Iterator[np.ndarray]:
    model, params = for_decoding(model, params)
    state, draws = _first(params, inputs, model=model, config=config, capacity=capacity)
    room, *later = rooms(capacity)
    for number in range(capacity):
        # Indexed on the host: on the device every number would be a program of its own.
        yield np.asarray(state.tokens_RT)[:, number].copy()
        if np.asarray(state.done_R).all():
            break
        if number + 1 == room:
            room, *later = later
            state = dataclasses.replace(state, cache=_grown(state.cache, slots(inputs.prompt.tokens_RP.shape[1], room)))
        state = _next(params, state, inputs.prompt, draws, model=model, config=config)
    check_overflow(state.cache.overflow)


@functools.partial(jax.jit, static_argnames=('model', 'config', 'capacity'))
def _first(
    params: Any, inputs: SearchInputs, *, model: nn.Module, config: DecodeConfig, capacity: int
) -> tuple[SampleState, Draws | None]:
    logits_BV, cache = start(model, params, inputs, rooms(capacity)[0])
    draws = make_draws(inputs, config)
    return choose_next(begin(cache, inputs.prompt, config, capacity), logits_BV, inputs.prompt, config, draws), draws


@functools.partial(jax.jit, static_argnames=('model', 'config'), donate_argnums=1)
def _next(
    params: Any, state: SampleState, prompt: Prompt, draws: Draws | None, *, model: nn.Module, config: DecodeConfig
) -> SampleState:
    logits_RV, state = read_last(make_step(model, params), state)
    return choose_next(state, logits_RV, prompt, config, draws)


@functools.partial(jax.jit, static_argnames='capacity')
def _grown(cache: Cache, capacity: int) -> Cache:
    # One function for all calls, so that a size is compiled once and not by each of them.
    return cache.grow(capacity)
