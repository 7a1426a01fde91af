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
from jax.sharding import Mesh

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.beam import beam_loop
from transformer_jax.decoding.cache_api import (
    for_decoding,
    for_steps,
    gather_beams,
    init_cache,
    numbers_per_slot,
    prefill,
    step,
)
from transformer_jax.decoding.growth import first_room, growing_loop, rooms, slots
from transformer_jax.decoding.inputs import SearchInputs, prepare
from transformer_jax.decoding.placement import on_every_host, place_rows
from transformer_jax.decoding.sampling import Draws, begin, choose_next, sample_loop
from transformer_jax.decoding.speculative import Draft, cache_room, check_draft, longest_row, speculative_loop
from transformer_jax.errors import UserError
from transformer_jax.sharding import mesh_of, tracing_on


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
    model: nn.Module,
    params: Any,
    tokens: Any,
    *,
    mask: Any = None,
    config: DecodeConfig | None = None,
    seed: int = 0,
    draft: Draft | tuple[nn.Module, Any] | None = None,
) -> Generation:
    """Generates the best answers to a batch of sources or prompts.

    The prompt is read in one pass, then a `lax.while_loop` adds a token a step until every row is done. Source length,
    prompt length and new-token limit are rounded up (`inputs.bucket`), so one compilation serves all lengths of a
    bucket; temperature and the length penalty's exponent may change without a new one too. A row's answer does not
    depend on the other rows, nor on the padding's side; a draw depends on seed, row number and draw number only.

    Args:
      model: from `build`, an encoder-decoder or a decoder.
      params: its parameters; where they lie on a mesh, so do the rows of the search and the cache.
      tokens: (B, S) ids of the source, or of a decoder's prompt.
      mask: (B, S), 1 for real tokens, padding on either side; None where all are real.
      config: the search; None takes `model.config.decode`, else `DecodeConfig()`.
      seed: of sampling.
      draft: a smaller model and its parameters, which drafts for this one: greedy answers stay what they are but for
        ties within the rounding of a product, draws keep their distribution; see `decoding.speculative`.

    Raises:
      UserError: on ids outside the vocabulary, lengths beyond the model's positions, a row without any possible token
        (logits which are not finite, or every token banned), or a draft model or search which do not go together.
    """
    config = resolve(model, config)
    inputs, static, capacity = prepare(model.config, tokens, mask, config, seed)
    mesh, width = mesh_of(params), int(inputs.prompt.limit_R.max())
    placed = place_rows(inputs, mesh)
    if draft is None:
        found, overflow = search(params, placed, model=model, config=static, capacity=capacity, mesh=mesh)
    else:
        draft = Draft(*draft)
        check_draft(draft, model.config, config, longest_row(inputs.prompt, inputs.source_mask))
        found, overflow = speculate(
            params, draft.params, placed, model=model, draft_model=draft.model, ahead=draft.tokens, config=static,
            capacity=capacity, mesh=mesh,
        )  # fmt: skip
    check_overflow(overflow)
    rows = len(inputs.temperature_B)
    generation = Generation(
        np.asarray(found.tokens_BKT)[:rows, :, :width],
        np.asarray(found.lengths_BK)[:rows],
        np.asarray(found.scores_BK)[:rows],
        np.asarray(found.log_probs_BKT)[:rows, :, :width] if config.return_log_probs else None,
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


def start(model: nn.Module, params: Any, inputs: SearchInputs, capacity: int, beams: int = 1) -> tuple[jax.Array, Any]:
    """Reads source and prompt; returns logits after them (B, V) and a cache for answers of `capacity` tokens."""
    batch, width = inputs.prompt.tokens_RP.shape
    cache = init_cache(model, batch, slots(width, capacity, beams), inputs.source, inputs.source_mask, beams)
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


@functools.partial(jax.jit, static_argnames=('model', 'config', 'capacity', 'mesh'))
def search(
    params: Any,
    inputs: SearchInputs,
    *,
    model: nn.Module,
    config: DecodeConfig,
    capacity: int,
    mesh: Mesh | None = None,
):
    """One whole search; returns its `Hypotheses` (B, num_return) and whether the cache overflowed.

    Args:
      mesh: where params and inputs lie, if on several devices.
    """
    with tracing_on(mesh):
        return on_every_host(_search(params, inputs, model, config, capacity))


def _search(params, inputs, model, config, capacity):
    # Once, outside of the loop: the loop's step then finds its layers unrolled already.
    model, params = for_decoding(model, params)
    rows = len(inputs.prompt.tokens_RP) * max(config.beam_size, config.num_return)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    stages = rooms(capacity, first_room(rows * numbers_per_slot(model.config), parameters))
    logits_BV, cache = start(model, params, inputs, stages[0], config.beam_size)
    prompt = inputs.prompt
    loop = growing_loop(stages, prompt.tokens_RP.shape[1], config.beam_size)
    step_fn = make_step(model, for_steps(params, rows))
    if config.beam_size > 1:
        found, cache = beam_loop(step_fn, gather_beams, logits_BV, cache, prompt, inputs.alpha, config, capacity, loop)
        return found, cache.overflow
    draws = make_draws(inputs, config)
    logits_RV, prompt = jnp.repeat(logits_BV, config.num_return, axis=0), prompt.repeat(config.num_return)
    cache = _repeat_cache(cache, config.num_return)
    state = sample_loop(step_fn, logits_RV, cache, prompt, config, capacity, draws, loop)
    return state.answers(config.num_return), state.cache.overflow


@functools.partial(jax.jit, static_argnames=('model', 'draft_model', 'ahead', 'config', 'capacity', 'mesh'))
def speculate(
    params: Any,
    draft_params: Any,
    inputs: SearchInputs,
    *,
    model: nn.Module,
    draft_model: nn.Module,
    ahead: int,
    config: DecodeConfig,
    capacity: int,
    mesh: Mesh | None = None,
):
    """One whole search with a draft model; returns what `search` does."""
    with tracing_on(mesh):
        found = _speculate(params, draft_params, inputs, model, draft_model, ahead, config, capacity)
        return on_every_host(found)


def _speculate(params, draft_params, inputs, model, draft_model, ahead, config, capacity):
    draws, times = make_draws(inputs, config), config.num_return

    def begun(model, params):
        """Logits of the first token, the cache which has read the prompt, and how to read more."""
        model, params = for_decoding(model, params)
        logits_BV, cache = start(model, params, inputs, cache_room(capacity, ahead))

        laid_out = for_steps(params, len(logits_BV) * times * (ahead + 1))

        def read(tokens_RT, mask_RT, cache):
            return prefill(model, laid_out, tokens_RT, cache, mask_RT)

        return jnp.repeat(logits_BV, times, axis=0), _repeat_cache(cache, times), read

    logits_RV, cache, read = begun(model, params)
    _, draft_cache, draft_read = begun(draft_model, draft_params)
    prompt = inputs.prompt.repeat(times)
    first = choose_next(begin(cache, prompt, config, capacity), logits_RV, prompt, config, draws)
    state = speculative_loop(read, draft_read, first, draft_cache, prompt, config, ahead, draws)
    answers = state.answers(capacity, config.pad_id).by_sentence(times)
    return answers, state.cache.overflow | state.draft_cache.overflow


def _repeat_cache(cache: Any, times: int) -> Any:
    """Returns the cache with each row `times` times in a row, for so many draws of each sentence."""
    if times == 1:
        return cache
    return gather_beams(cache, jnp.repeat(jnp.arange(cache.valid.shape[0]), times))
