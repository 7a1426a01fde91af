"""Generation: the best answers of a model, greedy, drawn or by beams, in one compiled program per bucket of lengths."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.beam import beam_loop
from transformer_jax.decoding.cache_api import for_decoding, gather_beams, init_cache, prefill, step
from transformer_jax.decoding.inputs import SearchInputs, prepare
from transformer_jax.decoding.sampling import Draws, sample_loop
from transformer_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Generation:
    """Answers, best first; numpy arrays on the host. R is `num_return`, T the largest limit among the rows.

    Attributes:
      tokens: (B, R, T) generated ids, without prompt and prefix, end token included, then `pad_id`.
      lengths: (B, R) generated tokens, end token included; 0 where fewer than R answers exist.
      scores: (B, R) sum of processed log-probabilities, over the length penalty for beams; -inf where none exists.
      log_probs: (B, R, T) the model's own log-probabilities before any processing, 0 after the end; None unless
        `return_log_probs`.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    scores: np.ndarray
    log_probs: np.ndarray | None


def generate(
    model: nn.Module, params: Any, tokens: Any, *, mask: Any = None, config: DecodeConfig | None = None, seed: int = 0
) -> Generation:
    """Generates the best answers to a batch of sources or prompts.

    The prompt is read in one pass, then a `lax.while_loop` adds a token a step until every row is done. Source length,
    prompt length and new-token limit are rounded up (`inputs.bucket`), so one compilation serves all lengths of a
    bucket; temperature and the length penalty's exponent may change without a new one too. A row's answer does not
    depend on the other rows, nor on the padding's side; a draw depends on seed, row number and draw number only.

    Args:
      model: from `build`, an encoder-decoder or a decoder.
      params: its parameters.
      tokens: (B, S) ids of the source, or of a decoder's prompt.
      mask: (B, S), 1 for real tokens, padding on either side; None where all are real.
      config: the search; None takes `model.config.decode`, else `DecodeConfig()`.
      seed: of sampling.

    Raises:
      UserError: on ids outside the vocabulary, lengths beyond the model's positions, or a row without any possible
        token (logits which are not finite, or every token banned).
    """
    config = resolve(model, config)
    inputs, static, capacity = prepare(model.config, tokens, mask, config, seed)
    found, overflow = search(params, inputs, model=model, config=static, capacity=capacity)
    check_overflow(overflow)
    width = int(inputs.prompt.limit_R.max())
    generation = Generation(
        np.asarray(found.tokens_BKT)[..., :width],
        np.asarray(found.lengths_BK),
        np.asarray(found.scores_BK),
        np.asarray(found.log_probs_BKT)[..., :width] if config.return_log_probs else None,
    )
    lost_B = ~np.isfinite(generation.scores[:, 0])
    if lost_B.any():
        raise UserError(
            f'row {int(np.argmax(lost_B))} has no answer: the logits are not finite, or every token is banned'
        )
    return generation


def resolve(model: nn.Module, config: DecodeConfig | None) -> DecodeConfig:
    """Returns the search to run: `config`, else the model's own, else the default."""
    return config or model.config.decode or DecodeConfig()


def check_overflow(overflow: jax.Array) -> None:
    """Raises if a cache was written past its end."""
    if bool(overflow):
        raise UserError('the cache is full: prompt and answer together are longer than its capacity')


def start(model: nn.Module, params: Any, inputs: SearchInputs, capacity: int) -> tuple[jax.Array, Any]:
    """Reads source and prompt; returns logits after them (B, V) and a cache with room for `capacity` more tokens."""
    batch, width = inputs.prompt.tokens_RP.shape
    cache = init_cache(model, batch, width + capacity, inputs.source, inputs.source_mask)
    mask_BP = jnp.arange(width) >= inputs.prompt.start_R[:, None]
    logits, cache = prefill(model, params, inputs.prompt.tokens_RP, cache, mask_BP, last_only=True)
    return logits[:, -1], cache


def make_step(model: nn.Module, params: Any) -> Callable[[jax.Array, Any], tuple[jax.Array, Any]]:
    """Returns `tokens_R1, cache -> logits_RV, cache` for the search loops."""

    def step_fn(tokens_R1: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        logits, cache = step(model, params, tokens_R1, cache)
        return logits[:, -1], cache

    return step_fn


def make_draws(inputs: SearchInputs, config: DecodeConfig) -> Draws | None:
    """Keys and temperatures of `num_return` draws per sentence; None for greedy search."""
    if not config.sample:
        return None
    batch = inputs.temperature_B.shape[0]
    fold = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
    keys_B = fold(jax.random.key(inputs.seed), jnp.arange(batch))
    keys_R = jax.vmap(fold, in_axes=(0, None))(keys_B, jnp.arange(config.num_return)).reshape(-1)
    return Draws(keys_R, jnp.repeat(inputs.temperature_B, config.num_return))


@functools.partial(jax.jit, static_argnames=('model', 'config', 'capacity'))
def search(params: Any, inputs: SearchInputs, *, model: nn.Module, config: DecodeConfig, capacity: int):
    """One whole search; returns its `Hypotheses` (B, num_return) and whether the cache overflowed."""
    # Once, outside of the loop: the loop's step then finds its layers unrolled already.
    model, params = for_decoding(model, params)
    logits_BV, cache = start(model, params, inputs, capacity)
    step_fn, prompt = make_step(model, params), inputs.prompt
    if config.beam_size > 1:
        found, cache = beam_loop(step_fn, gather_beams, logits_BV, cache, prompt, inputs.alpha, config, capacity)
        return found, cache.overflow
    batch, draws = prompt.limit_R.shape[0], make_draws(inputs, config)
    if config.num_return > 1:
        cache = gather_beams(cache, jnp.repeat(jnp.arange(batch), config.num_return))
        logits_BV, prompt = jnp.repeat(logits_BV, config.num_return, axis=0), prompt.repeat(config.num_return)
    state = sample_loop(step_fn, logits_BV, cache, prompt, config, capacity, draws)
    return state.answers(config.num_return), state.cache.overflow
