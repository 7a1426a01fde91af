"""Greedy search and sampling: one loop which knows only `tokens, cache -> logits, cache`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.hypotheses import Hypotheses
from transformer_jax.decoding.largest import largest
from transformer_jax.decoding.processors import Prompt, is_any_of, process, warp

StepFn = Callable[[jax.Array, Any], tuple[jax.Array, Any]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Draws:
    """Randomness of sampling: row r draws with `keys_R[r]` alone, so no row's answer depends on another's.

    Attributes:
      keys_R: one random key per row.
      temperature_R: 0 is argmax.
    """

    keys_R: jax.Array
    temperature_R: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SampleState:
    """State of the loop after `generated` tokens.

    Attributes:
      generated: tokens chosen so far, 0-d; the same for all rows, those which are done included.
      tokens_RT: the answers, padded after their end.
      sums_R: sums of the processed log-probabilities.
      lengths_R: answer lengths in tokens, end token included.
      done_R: rows which ended with an end token or at their limit.
      log_probs_RT: the model's log-probabilities of the answers, 0 after their end; None unless asked for.
      cache: the model's cache, which has read all but the last token.
    """

    generated: jax.Array
    tokens_RT: jax.Array
    sums_R: jax.Array
    lengths_R: jax.Array
    done_R: jax.Array
    log_probs_RT: jax.Array | None
    cache: Any

    def answers(self, num_return: int) -> Hypotheses:
        """Returns the rows by sentence, `num_return` of each, the best first."""

        return Hypotheses(self.sums_R, self.tokens_RT, self.lengths_R, self.log_probs_RT).by_sentence(num_return)


def begin(cache: Any, prompt: Prompt, config: DecodeConfig, capacity: int) -> SampleState:
    """Returns the state before the first token, with room for `capacity` tokens per row."""
    rows = prompt.limit_R.shape[0]
    log_probs_RT = jnp.zeros((rows, capacity)) if config.return_log_probs else None
    return SampleState(
        jnp.int32(0),
        jnp.full((rows, capacity), config.pad_id, jnp.int32),
        jnp.zeros(rows),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros(rows, bool),
        log_probs_RT,
        cache,
    )


def choose_next(
    state: SampleState, logits_RV: jax.Array, prompt: Prompt, config: DecodeConfig, draws: Draws | None
) -> SampleState:
    """Chooses one token per row from the logits after the last token.

    Args:
      state: the state so far.
      logits_RV: fp32 logits of the next token.
      prompt: what stands before the answers, with the rows' limits.
      config: the search.
      draws: None for greedy search: the most likely token, the lowest id among equals.

    Returns:
      The state one token later; its cache has not read that token yet.
    """
    processed_RV = process(logits_RV, prompt, state.tokens_RT, state.generated, config)
    if draws is None:
        # An argmax, in two stages: XLA on CPU takes 2 to 5 % of a step to look at all tokens one after another.
        chosen_R = largest(processed_RV, 1)[1][:, 0]
    else:
        processed_RV = warp(processed_RV, draws.temperature_R, config)
        keys_R = jax.vmap(jax.random.fold_in, in_axes=(0, None))(draws.keys_R, state.generated)
        drawn_R = jax.vmap(jax.random.categorical)(keys_R, processed_RV)
        chosen_R = jnp.where(draws.temperature_R == 0, jnp.argmax(processed_RV, axis=1), drawn_R)
    live_R = ~state.done_R
    chosen_R = jnp.where(live_R, chosen_R, config.pad_id).astype(jnp.int32)
    lengths_R = state.lengths_R + live_R
    ended_R = is_any_of(chosen_R, config.eos_ids) | (lengths_R >= prompt.limit_R)
    log_probs_RT = state.log_probs_RT
    if log_probs_RT is not None:
        own_R = jnp.where(live_R, _log_prob(logits_RV, chosen_R), 0.0)
        log_probs_RT = log_probs_RT.at[:, state.generated].set(own_R)
    return dataclasses.replace(
        state,
        generated=state.generated + 1,
        tokens_RT=state.tokens_RT.at[:, state.generated].set(chosen_R),
        sums_R=state.sums_R + jnp.where(live_R, _log_prob(processed_RV, chosen_R), 0.0),
        lengths_R=lengths_R,
        done_R=state.done_R | ended_R,
        log_probs_RT=log_probs_RT,
    )


def read_last(step_fn: StepFn, state: SampleState) -> tuple[jax.Array, SampleState]:
    """Lets the model read the last chosen tokens: logits of the next ones (R, V), and the state with the new cache."""
    last_R1 = jax.lax.dynamic_slice_in_dim(state.tokens_RT, state.generated - 1, 1, axis=1)
    logits_RV, cache = step_fn(last_R1, state.cache)
    return logits_RV, dataclasses.replace(state, cache=cache)


def sample_loop(
    step_fn: StepFn,
    logits_RV: jax.Array,
    cache: Any,
    prompt: Prompt,
    config: DecodeConfig,
    capacity: int,
    draws: Draws | None = None,
    loop: Callable[..., Any] = jax.lax.while_loop,
) -> SampleState:
    """Generates until every row has ended; greedy without `draws`.

    Args:
      step_fn: `tokens_R1, cache -> logits_RV, cache`: reads one token per row.
      logits_RV: logits after the prompt.
      cache: the cache which has read the prompt.
      prompt: the prompt's tokens, and the rows' limits, each at most `capacity`.
      config: the search.
      capacity: static room for tokens.
      draws: keys and temperatures of sampling.
      loop: called as `jax.lax.while_loop` is; it may change the cache between two steps.

    Returns:
      The last state. The final tokens are not read by the model: n tokens cost n - 1 steps.
    """

    def advance(state: SampleState) -> SampleState:
        logits_RV, state = read_last(step_fn, state)
        return choose_next(state, logits_RV, prompt, config, draws)

    first = choose_next(begin(cache, prompt, config, capacity), logits_RV, prompt, config, draws)
    return loop(lambda state: ~state.done_R.all(), advance, first)


def _log_prob(scores_RV: jax.Array, tokens_R: jax.Array) -> jax.Array:
    log_probs_RV = jax.nn.log_softmax(scores_RV, axis=1)
    return log_probs_RV.at[jnp.arange(len(tokens_R)), tokens_R].get(mode='promise_in_bounds')
