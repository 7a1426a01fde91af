"""Speculative decoding: a small model drafts tokens one by one, the large one checks all of them in a single pass.

In a round the draft model proposes G tokens d_1 ... d_G, drawn from its own distributions q_1 ... q_G; one pass of the
model gives p_1 ... p_{G+1}, its distributions at the same places. d_i is accepted with probability
min(1, p_i(d_i) / q_i(d_i)), one after the other. At the first refusal i the answer goes on with a token drawn from
max(p_i - q_i, 0), normalised; if nothing is refused, with one drawn from p_{G+1}. So a round gives 1 to G + 1 tokens,
and every token is distributed as if the model alone had drawn it, whatever the draft model is. Greedy search is the
case where each distribution is all on its mode: d_i is accepted where it is what the model would have said.

p and q are what is left after all penalties, bans and filters of the config, so all of them are supported.

Rows accept different numbers of tokens, but the slots of a cache are filled alike in all rows: what a row refuses stays
as a masked slot until the cache is packed, which happens when it is full.

Leviathan et al. 2023, algorithm 1; Chen et al. 2023, algorithm 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.config import ModelConfig
from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.hypotheses import Hypotheses
from transformer_jax.decoding.processors import Prompt, is_any_of, process, warp
from transformer_jax.decoding.sampling import Draws, SampleState
from transformer_jax.errors import UserError
from transformer_jax.layers.cache import Cache

ReadFn = Callable[[jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]


class Draft(NamedTuple):
    """A model which drafts for another one: same kind, same vocabulary; `tokens` is G, how many it drafts a round."""

    model: nn.Module
    params: Any
    tokens: int = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SpeculativeState:
    """State of the loop between rounds.

    Attributes:
      tokens_RT: the answers, with room for a round past the limit.
      sums_R, lengths_R, done_R, log_probs_RT: as in `SampleState`; rows have different lengths.
      cache, draft_cache: caches of both models, which have read all but each row's last token.
    """

    tokens_RT: jax.Array
    sums_R: jax.Array
    lengths_R: jax.Array
    done_R: jax.Array
    log_probs_RT: jax.Array | None
    cache: Cache
    draft_cache: Cache

    def answers(self, capacity: int, pad_id: int) -> Hypotheses:
        """Returns the rows as far as they are answers, padded up to `capacity`."""
        real_RT = jnp.arange(capacity) < self.lengths_R[:, None]

        def cut(rows_RT, filling):
            return None if rows_RT is None else jnp.where(real_RT, rows_RT[:, :capacity], filling)

        return Hypotheses(self.sums_R, cut(self.tokens_RT, pad_id), self.lengths_R, cut(self.log_probs_RT, 0.0))


def check_draft(draft: Draft, model: ModelConfig, config: DecodeConfig, longest: int) -> None:
    """Holds a draft model and a search against the model it drafts for.

    Args:
      longest: most positions which prompt and answer of a row, or its source, need.

    Raises:
      UserError: naming what does not fit or is not supported.
    """
    own = draft.model.config
    if draft.tokens < 1:
        raise UserError(f'the draft has tokens = {draft.tokens}; it drafts at least 1 a round')
    for name in ('kind', 'vocab_size'):
        if getattr(own, name) != getattr(model, name):
            raise UserError(
                f'the draft model has {name} = {getattr(own, name)!r}; it must be {getattr(model, name)!r}, as the '
                'model it drafts for has'
            )
    if config.beam_size > 1:
        raise UserError(f'beam_size = {config.beam_size} does not go with a draft model; set beam_size = 1')
    if own.max_positions is not None and longest > own.max_positions:
        raise UserError(f'{longest} positions are needed; the draft model has {own.max_positions}')
    if model.rope_scaling is not None and model.rope_scaling.kind == 'dynamic':
        raise UserError(
            "rope_scaling.kind = 'dynamic' does not go with a draft model: a key's turn depends on how many tokens are "
            'read at a time'
        )
    if model.mixture is not None and model.mixture.dispatch == 'capacity':
        raise UserError(
            "mixture.dispatch = 'capacity' does not go with a draft model: an expert's places depend on how many "
            "tokens are read at a time; choose 'dropless'"
        )


def cache_room(capacity: int, ahead: int) -> int:
    """Tokens for which the caches get room: the answer's, a round's, and a quarter so as to pack seldom."""
    return capacity + ahead + 1 + capacity // 4


def speculative_loop(
    read: ReadFn,
    draft_read: ReadFn,
    first: SampleState,
    draft_cache: Cache,
    prompt: Prompt,
    config: DecodeConfig,
    ahead: int,
    draws: Draws | None = None,
) -> SpeculativeState:
    """Generates until every row has ended; greedy without `draws`.

    Args:
      read: `tokens_RT, mask_RT, cache -> logits_RTV, cache` of the model.
      draft_read: the same of the draft model.
      first: the state after one token, which the model itself has chosen.
      draft_cache: the draft model's cache, which has read the prompt; both have `cache_room` slots after it.
      prompt: the prompt's tokens, and the rows' limits, each at most `capacity`.
      config: the search.
      ahead: G, tokens drafted a round.
      draws: keys and temperatures of sampling.

    Returns:
      The last state.
    """

    def pad(rows_RT):
        return None if rows_RT is None else jnp.pad(rows_RT, [(0, 0), (0, ahead + 1)])

    state = SpeculativeState(
        pad(first.tokens_RT),
        first.sums_R,
        first.lengths_R,
        first.done_R,
        pad(first.log_probs_RT),
        first.cache,
        draft_cache,
    )

    def fits(state: SpeculativeState) -> jax.Array:
        return ~state.done_R.all() & (state.cache.filled + ahead + 1 <= state.cache.capacity)

    def advance(state: SpeculativeState) -> SpeculativeState:
        return _round(read, draft_read, state, prompt, config, ahead, draws)

    def packed(state: SpeculativeState) -> SpeculativeState:
        state = dataclasses.replace(state, cache=state.cache.pack(), draft_cache=state.draft_cache.pack())
        return jax.lax.while_loop(fits, advance, state)

    state = jax.lax.while_loop(fits, advance, state)
    state = jax.lax.while_loop(lambda state: ~state.done_R.all(), packed, state)
    return state


def _round(
    read: ReadFn,
    draft_read: ReadFn,
    state: SpeculativeState,
    prompt: Prompt,
    config: DecodeConfig,
    ahead: int,
    draws: Draws | None,
) -> SpeculativeState:
    """Drafts `ahead` tokens, checks them, and takes the accepted ones and one more."""
    rows, lengths_R = jnp.arange(len(state.done_R)), state.lengths_R
    keys_R = None if draws is None else jax.vmap(jax.random.fold_in)(draws.keys_R, lengths_R)

    def keys(number):
        return None if draws is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys_R, number)

    def distribution(logits_RV, tokens_RT, place):
        """Processed logits of the token at `place` past each row's length."""
        return _processed(logits_RV, prompt, tokens_RT, lengths_R + place, config, draws)

    def draft(carry, place):
        tokens_RT, cache = carry
        # The token at a row's limit is the last: nothing need be read after it.
        mask_R1 = (~state.done_R & (lengths_R + place < prompt.limit_R))[:, None]
        last_R1 = tokens_RT[rows, lengths_R + place - 1][:, None]
        logits_R1V, cache = draft_read(last_R1, mask_R1, cache)
        scores_RV = distribution(logits_R1V[:, 0], tokens_RT, place)
        chosen_R = _draw(scores_RV, draws, keys(place))
        # What the last step says is not used; its token only has to be read.
        return (tokens_RT.at[rows, lengths_R + place].set(chosen_R), cache), (scores_RV, mask_R1[:, 0])

    places = jnp.arange(ahead + 1)
    (drafted_RT, draft_cache), (draft_scores, mask) = jax.lax.scan(draft, (state.tokens_RT, state.draft_cache), places)
    window_RG = lengths_R[:, None] - 1 + places
    read_RG = jnp.take_along_axis(drafted_RT, window_RG, axis=1)
    logits_RGV, cache = read(read_RG, mask.T, state.cache)
    scores = jax.vmap(distribution, in_axes=(1, None, 0), out_axes=1)
    scores_RGV = scores(logits_RGV, drafted_RT, places)

    p_RGV, q_RGV = _probabilities(scores_RGV, draws), _probabilities(jnp.moveaxis(draft_scores, 0, 1), draws)
    uniform_RG = jnp.zeros(window_RG.shape) if draws is None else jax.vmap(
        lambda key: jax.random.uniform(key, (ahead + 1,)))(keys(ahead + 1))  # fmt: skip
    proposed_RG = jnp.take_along_axis(drafted_RT, window_RG + 1, axis=1)
    accepted_R, rest_RV = accept(p_RGV, q_RGV, proposed_RG[:, :ahead], uniform_RG[:, :ahead])
    extra_R = _draw(jnp.log(rest_RV), draws, keys(ahead + 2))
    chosen_RG = jnp.where(places == accepted_R[:, None], extra_R[:, None], proposed_RG)

    # A row goes on up to its first end token or its limit.
    number_RG = lengths_R[:, None] + 1 + places
    ends_RG = is_any_of(chosen_RG, config.eos_ids) | (number_RG >= prompt.limit_R[:, None])
    ended_before_RG = jnp.cumsum(ends_RG, axis=1) - ends_RG > 0
    taken_RG = (places <= accepted_R[:, None]) & ~ended_before_RG & ~state.done_R[:, None]
    advance_R = taken_RG.sum(axis=1)

    def write(rows_RT, new_RG):
        return jax.vmap(lambda row, new, at: jax.lax.dynamic_update_slice(row, new, (at,)))(rows_RT, new_RG, lengths_R)

    log_probs_RT = state.log_probs_RT
    if log_probs_RT is not None:
        log_probs_RT = write(log_probs_RT, _log_probs(logits_RGV, chosen_RG))
    return SpeculativeState(
        write(drafted_RT, chosen_RG),
        state.sums_R + jnp.where(taken_RG, _log_probs(scores_RGV, chosen_RG), 0.0).sum(axis=1),
        lengths_R + advance_R,
        state.done_R | (taken_RG & ends_RG).any(axis=1),
        log_probs_RT,
        cache.forget(ahead + 1, advance_R),
        draft_cache.forget(ahead + 1, advance_R),
    )


def accept(
    p_RGV: jax.Array, q_RGV: jax.Array, proposed_RG: jax.Array, uniform_RG: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns how many proposed tokens are accepted, and the distribution of the token after them.

    Args:
      p_RGV: (R, G + 1, V) distributions of the model; q_RGV: those of the draft model, the last of which is not read.
      proposed_RG: (R, G) tokens, token i drawn from q_RGV[:, i].
      uniform_RG: (R, G) draws from [0, 1).
    """
    ahead = proposed_RG.shape[1]

    def of_proposed(probabilities):
        return jnp.take_along_axis(probabilities[:, :ahead], proposed_RG[..., None], axis=2)[..., 0]

    accepts_RG = uniform_RG * of_proposed(q_RGV) < of_proposed(p_RGV)
    accepted_R = jnp.cumprod(accepts_RG, axis=1).sum(axis=1)
    at = accepted_R[:, None, None]
    p_RV = jnp.take_along_axis(p_RGV, at, axis=1)[:, 0]
    # After a round without refusal there is nothing to take off: q past the last proposal is 0.
    q_RGV = q_RGV.at[:, ahead].set(0.0)
    rest_RV = jnp.maximum(p_RV - jnp.take_along_axis(q_RGV, at, axis=1)[:, 0], 0.0)
    # Where p = q but for rounding, a refusal may leave nothing; it has no probability either.
    return accepted_R, jnp.where(rest_RV.sum(axis=1, keepdims=True) > 0, rest_RV, p_RV)


def _processed(logits_RV, prompt: Prompt, tokens_RT, generated_R, config: DecodeConfig, draws: Draws | None):
    """`process`, and `warp` where there are draws, of rows with different numbers of generated tokens."""

    def of_row(logits_V, prompt, tokens_T, generated, temperature):
        prompt, rows = jax.tree.map(lambda leaf: leaf[None], (prompt, (logits_V, tokens_T)))
        scores_1V = process(rows[0], prompt, rows[1], generated, config)
        return (scores_1V if draws is None else warp(scores_1V, temperature[None], config))[0]

    temperature_R = jnp.zeros(generated_R.shape) if draws is None else draws.temperature_R
    return jax.vmap(of_row)(logits_RV, prompt, tokens_RT, generated_R, temperature_R)


def _probabilities(scores: jax.Array, draws: Draws | None) -> jax.Array:
    """The distributions (R, G, V) of processed logits; in rows without chance all is on the mode."""
    mode = jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1])
    if draws is None:
        return mode
    return jnp.where(draws.temperature_R[:, None, None] == 0, mode, jax.nn.softmax(scores, axis=-1))


def _draw(scores_RV: jax.Array, draws: Draws | None, keys_R: jax.Array | None) -> jax.Array:
    mode_R = jnp.argmax(scores_RV, axis=1).astype(jnp.int32)
    if draws is None:
        return mode_R
    drawn_R = jax.vmap(jax.random.categorical)(keys_R, scores_RV).astype(jnp.int32)
    return jnp.where(draws.temperature_R == 0, mode_R, drawn_R)


def _log_probs(scores_RGV: jax.Array, tokens_RG: jax.Array) -> jax.Array:
    log_probs_RGV = jax.nn.log_softmax(scores_RGV, axis=-1)
    return jnp.take_along_axis(log_probs_RGV, tokens_RG[..., None], axis=2)[..., 0]


def longest_row(prompt: Prompt, source_mask: np.ndarray | None) -> int:
    """Returns the most positions which a row needs: of its source, or of its prompt and answer but for the last."""
    own = int((prompt.tokens_RP.shape[1] - prompt.start_R + prompt.limit_R).max()) - 1
    return own if source_mask is None else max(own, int(source_mask.sum(axis=1).max()))
