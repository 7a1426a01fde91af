"""Score processors: penalties and bans which a search lays on each step's scores, and the filters of sampling.

Pure functions on (R, V) scores with static shapes; R counts rows (sentences, beams or draws), V is the vocabulary.
A banned token scores -inf. Semantics and order are those of transformers; where that library counts padding as text,
these count real tokens only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.decode_config import DecodeConfig

# fp32 cumulative sums of probabilities are off by about this much: a mass which reaches p up to it has reached p.
MASS_TOLERANCE = 1e-6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompt:
    """What stands before the first generated token, one row per search row.

    Attributes:
      tokens_RP: ids, padded on the left, so that the last column is real.
      start_R: column of the first real token.
      limit_R: most tokens this row may generate.
    """

    tokens_RP: jax.Array
    start_R: jax.Array
    limit_R: jax.Array

    def repeat(self, times: int) -> Prompt:
        """Returns each row `times` times in a row: 0, 0, 1, 1, ..."""
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), self)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class History:
    """Tokens of prompt and answer so far: the real ones of row r are `tokens_RS[r, start_R[r]:length]`."""

    tokens_RS: jax.Array
    start_R: jax.Array
    length: jax.Array

    def real_RS(self) -> jax.Array:
        slots_S = jnp.arange(self.tokens_RS.shape[1])
        return (slots_S >= self.start_R[:, None]) & (slots_S < self.length)

    def suffix(self, count: int) -> tuple[jax.Array, jax.Array]:
        """The last `count` tokens (R, count), and whether all of them are real (R,)."""
        first = self.length - count
        suffix = jax.lax.dynamic_slice_in_dim(self.tokens_RS, first, count, axis=1)
        return suffix, first >= self.start_R


def repetition_penalty(scores_RV: jax.Array, history: History, penalty: float) -> jax.Array:
    """Lowers scores of tokens seen in `history`: s / penalty where s > 0, s * penalty where not (Keskar 2019, 4.1)."""
    penalised_RV = jnp.where(scores_RV > 0, scores_RV / penalty, scores_RV * penalty)
    return jnp.where(_marked(scores_RV, history.tokens_RS, history.real_RS()), penalised_RV, scores_RV)


def no_repeat_ngram(scores_RV: jax.Array, history: History, size: int) -> jax.Array:
    """Bans every token which would complete an n-gram of `size` tokens which `history` already holds."""
    windows = history.tokens_RS.shape[1] - size + 1
    if windows < 1:
        return scores_RV
    suffix, _ = history.suffix(size - 1)
    first_W = jnp.arange(windows)
    # A window is real from its first to its last token; none is when the history is shorter than the n-gram.
    match_RW = (first_W >= history.start_R[:, None]) & (first_W + size <= history.length)
    for offset in range(size - 1):
        match_RW &= history.tokens_RS[:, offset : offset + windows] == suffix[:, offset, None]
    return jnp.where(_marked(scores_RV, history.tokens_RS[:, size - 1 :], match_RW), -jnp.inf, scores_RV)


def forbid(scores_RV: jax.Array, history: History | None, forbidden: Iterable[int | tuple[int, ...]]) -> jax.Array:
    """Bans ids, and the last id of each forbidden sequence whose beginning `history` ends with.

    `history` may be None when `forbidden` holds single ids only.
    """
    sequences = [entry if isinstance(entry, tuple) else (entry,) for entry in forbidden]
    for length in sorted({len(sequence) for sequence in sequences}):
        group = np.array([sequence for sequence in sequences if len(sequence) == length], np.int32)
        last = group[:, -1]
        if length == 1:
            scores_RV = scores_RV.at[:, last].set(-jnp.inf)
        elif length <= history.tokens_RS.shape[1]:
            suffix, real_R = history.suffix(length - 1)
            match_RQ = real_R[:, None] & (suffix[:, None] == group[:, :-1]).all(-1)
            last_RQ = jnp.broadcast_to(last, match_RQ.shape)
            scores_RV = jnp.where(_marked(scores_RV, last_RQ, match_RQ), -jnp.inf, scores_RV)
    return scores_RV


def min_new_tokens(scores_RV: jax.Array, generated: jax.Array, minimum: int, eos_ids: tuple[int, ...]) -> jax.Array:
    """Bans the end tokens while fewer than `minimum` tokens are `generated`."""
    banned_RV = scores_RV.at[:, np.array(eos_ids, np.int32)].set(-jnp.inf)
    return jnp.where(generated < minimum, banned_RV, scores_RV)


def force(scores_RV: jax.Array, where_R: jax.Array, token: int) -> jax.Array:
    """Rows `where_R` can only choose `token`, which scores 0 there."""
    forced_V = jnp.where(jnp.arange(scores_RV.shape[1]) == token, 0.0, -jnp.inf)
    return jnp.where(where_R[:, None], forced_V, scores_RV)


def process(
    scores_RV: jax.Array, prompt: Prompt, answer_RT: jax.Array, generated: jax.Array, config: DecodeConfig
) -> jax.Array:
    """Lays the penalties and bans of `config` on one step's scores, in the order of `DecodeConfig`'s docstring.

    Args:
      scores_RV: logits, or log-probabilities for beams.
      prompt: what stands before the answer.
      answer_RT: generated tokens; those from `generated` on are not read.
      generated: number of tokens generated so far, 0-d.
    """
    needs_history = (
        config.repetition_penalty != 1
        or config.no_repeat_ngram_size
        or any(isinstance(entry, tuple) for entry in config.forbidden_tokens)
    )
    history = None
    if needs_history:
        tokens_RS = jnp.concatenate([prompt.tokens_RP, answer_RT], axis=1)
        history = History(tokens_RS, prompt.start_R, prompt.tokens_RP.shape[1] + generated)
    if config.repetition_penalty != 1:
        scores_RV = repetition_penalty(scores_RV, history, config.repetition_penalty)
    if config.no_repeat_ngram_size:
        scores_RV = no_repeat_ngram(scores_RV, history, config.no_repeat_ngram_size)
    if config.forbidden_tokens:
        scores_RV = forbid(scores_RV, history, config.forbidden_tokens)
    if config.min_new_tokens and config.eos_ids:
        scores_RV = min_new_tokens(scores_RV, generated, config.min_new_tokens, config.eos_ids)
    if config.forced_first_token is not None:
        scores_RV = force(scores_RV, jnp.broadcast_to(generated == 0, prompt.limit_R.shape), config.forced_first_token)
    if config.forced_last_token is not None:
        scores_RV = force(scores_RV, generated == prompt.limit_R - 1, config.forced_last_token)
    return scores_RV


def top_k(logits_RV: jax.Array, k: int) -> jax.Array:
    """Keeps the `k` largest logits and ties with the k-th; k of the vocabulary or more keeps all."""
    kth_R1 = jax.lax.top_k(logits_RV, min(k, logits_RV.shape[1]))[0][:, -1:]
    return jnp.where(logits_RV < kth_R1, -jnp.inf, logits_RV)


def top_p(logits_RV: jax.Array, p: float) -> jax.Array:
    """Keeps the smallest set, most likely first, whose probability reaches `p` (Holtzman 2020); never empty."""
    order_RV = jnp.argsort(-logits_RV, axis=1, stable=True)
    sorted_RV = jax.nn.softmax(jnp.take_along_axis(logits_RV, order_RV, axis=1), axis=1)
    mass_before_RV = jnp.cumsum(sorted_RV, axis=1) - sorted_RV
    kept_RV = (mass_before_RV < p - MASS_TOLERANCE).at[:, 0].set(True)
    kept_RV = jnp.take_along_axis(kept_RV, jnp.argsort(order_RV, axis=1), axis=1)
    return jnp.where(kept_RV, logits_RV, -jnp.inf)


def min_p(logits_RV: jax.Array, p: float) -> jax.Array:
    """Keeps tokens at least `p` times as likely as the most likely one."""
    probs_RV = jax.nn.softmax(logits_RV, axis=1)
    return jnp.where(probs_RV < p * probs_RV.max(axis=1, keepdims=True), -jnp.inf, logits_RV)


def warp(logits_RV: jax.Array, temperature_R: jax.Array, config: DecodeConfig) -> jax.Array:
    """Temperature, then top k, top p and min p; rows of temperature 0 are returned as they are, for argmax."""
    greedy_R1 = temperature_R[:, None] == 0
    warped_RV = logits_RV / jnp.where(greedy_R1, 1.0, temperature_R[:, None])
    if config.top_k:
        warped_RV = top_k(warped_RV, config.top_k)
    if config.top_p < 1:
        warped_RV = top_p(warped_RV, config.top_p)
    if config.min_p:
        warped_RV = min_p(warped_RV, config.min_p)
    return jnp.where(greedy_R1, logits_RV, warped_RV)


def is_any_of(tokens: jax.Array, ids: tuple[int, ...]) -> jax.Array:
    """Whether each token is one of `ids`."""
    return (tokens[..., None] == np.array(ids, np.int32)).any(-1)


def _marked(scores_RV: jax.Array, tokens_RQ: jax.Array, where_RQ: jax.Array) -> jax.Array:
    """(R, V), true at the tokens for which `where_RQ` is true."""
    rows_R1 = jnp.arange(scores_RV.shape[0])[:, None]
    return jnp.zeros(scores_RV.shape, bool).at[rows_R1, tokens_RQ].max(where_RQ)
