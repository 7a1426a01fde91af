"""Beam search as one loop which knows only `tokens, cache -> logits, cache`.

Each step ranks all continuations of the live beams by their sum of processed log-probabilities and takes the best
C = max(2, 1 + number of end ids) * K: however many of them end, K can go on. A continuation *ends* with an end token,
or at its row's limit. It is kept as finished if it ranks among the K best continuations (as in transformers), or if
the step prunes nothing, that is, when every continuation which does not end stays live; so a beam as wide as the
number of live prefixes finds exactly what enumeration finds. Finished hypotheses leave the beam and compete by score,
sum / penalty(n) (`DecodeConfig`): the best K are kept, an earlier one before a later equal.

Worked example: K = 2, end token 9, vocabulary {3, 4, 9}, probabilities (.5, .3, .2) everywhere, no length penalty.

  step  candidates, best first              live      finished
  1     3 (.5)   4 (.3)   9 (.2)            3, 4      9 (.2): not among the two best, but nothing was pruned
  2     33 (.25) 34 (.15) 43 (.15) 39 (.1)  33, 34    9 (.2): 39 ranks fourth and 43 was pruned, so 39 does not count

References: Graves 2012; Wu et al. 2016, section 7 (length penalty); Vijayakumar et al. 2016, algorithm 1 (groups).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from transformer_jax.decode_config import DecodeConfig
from transformer_jax.decoding.hypotheses import Hypotheses, join, take
from transformer_jax.decoding.largest import largest
from transformer_jax.decoding.processors import Prompt, is_any_of, process
from transformer_jax.decoding.sampling import StepFn

GatherFn = Callable[[Any, jax.Array], Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Group:
    """Beams of one group: K live and K finished hypotheses per sentence.

    Attributes:
      live: hypotheses which can go on; scores are sums.
      finished: hypotheses which ended; never extended, and only a better one takes a place.
      open_B: sentences in which the live hypotheses may still improve the finished ones.
      parents_BK: beam of the step before from which each live hypothesis comes: how the cache has to be reordered.
    """

    live: Hypotheses
    finished: Hypotheses
    open_B: jax.Array
    parents_BK: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BeamState:
    """State of the loop after `generated` tokens.

    Attributes:
      generated: tokens of every live hypothesis, 0-d.
      groups: the beam groups; one unless diversity is asked for.
      cache: rows (sentence, group, beam), in the order before the last reordering.
    """

    generated: jax.Array
    groups: tuple[Group, ...]
    cache: Any

    @property
    def searching_R(self) -> jax.Array:
        """Rows whose group is still open; what the others read does not matter any longer."""
        open_BG = jnp.stack([group.open_B for group in self.groups], axis=1)
        return jnp.repeat(open_BG.reshape(-1), self.groups[0].parents_BK.shape[1])


def length_penalty(length: jax.Array, alpha: jax.Array, kind: str) -> jax.Array:
    """What a sum over `length` generated tokens is divided by: 'gnmt' ((5 + n) / 6) ** alpha, 'length' n ** alpha."""
    length = jnp.asarray(length, jnp.float32)
    return ((5 + length) / 6 if kind == 'gnmt' else length) ** alpha


def best_attainable(sums: jax.Array, length: jax.Array, limit: jax.Array, alpha: jax.Array, kind: str) -> jax.Array:
    """Upper bound of the score of any continuation of hypotheses of `length` tokens and log-probability `sums`.

    Log-probabilities only lower a sum, and the penalty is monotone in the length: its most flattering value stands at
    one end of the lengths still reachable, the limit for alpha > 0 and the next token for alpha < 0.
    """
    ends = jnp.minimum(length + 1, limit), limit
    return jnp.maximum(*(sums / length_penalty(end, alpha, kind) for end in ends))


def beam_loop(
    step_fn: StepFn,
    gather_fn: GatherFn,
    logits_BV: jax.Array,
    cache: Any,
    prompt: Prompt,
    alpha: jax.Array,
    config: DecodeConfig,
    capacity: int,
    loop: Callable[..., Any] = jax.lax.while_loop,
) -> tuple[Hypotheses, Any]:
    """Searches until no sentence can improve.

    Args:
      step_fn: `tokens_R1, cache -> logits_RV, cache` with R = B * beam_size rows, the beams of a sentence together.
      gather_fn: `cache, index_R -> cache` whose row r is the old row `index_R[r]`.
      logits_BV: logits after the prompt, one row per sentence.
      cache: the cache which has read the prompt, one row per sentence.
      prompt: one row per sentence, with the limits, each at most `capacity`.
      alpha: exponent of the length penalty, 0-d; it stands in for `config.length_penalty_alpha`, which is not read, so
        that a sweep over it compiles once.
      config: the search.
      capacity: static room for tokens.
      loop: called as `jax.lax.while_loop` is; it may change the cache between two steps.

    Returns:
      The `num_return` best hypotheses of each sentence, where fewer exist the rest with score -inf and length 0; and
      the last cache.
    """
    batch, beams = prompt.limit_R.shape[0], config.beam_size
    cache = gather_fn(cache, jnp.repeat(jnp.arange(batch), beams))
    first = BeamState(
        jnp.int32(0), tuple(_empty_group(batch, config, capacity) for _ in range(config.beam_groups)), cache
    )
    first = choose_next(first, jnp.repeat(logits_BV, beams, axis=0), prompt, alpha, config)

    def going_on(state: BeamState) -> jax.Array:
        return jnp.any(jnp.stack([group.open_B for group in state.groups]))

    def advance(state: BeamState) -> BeamState:
        logits_RV, state = read_last(step_fn, gather_fn, state)
        return choose_next(state, logits_RV, prompt, alpha, config)

    last = loop(going_on, advance, first)
    return join([group.finished for group in last.groups]).best(config.num_return), last.cache


def read_last(step_fn: StepFn, gather_fn: GatherFn, state: BeamState) -> tuple[jax.Array, BeamState]:
    """Reorders the cache to the live beams and lets the model read their last tokens."""
    tokens_BKT = jnp.concatenate([group.live.tokens_BKT for group in state.groups], axis=1)
    size = state.groups[0].parents_BK.shape[1]
    parents_BK = jnp.concatenate([group.parents_BK + size * g for g, group in enumerate(state.groups)], axis=1)
    batch, beams = parents_BK.shape
    index_R = (parents_BK + beams * jnp.arange(batch)[:, None]).reshape(-1)
    last_R1 = jax.lax.dynamic_slice_in_dim(tokens_BKT, state.generated - 1, 1, axis=2).reshape(-1, 1)
    logits_RV, cache = step_fn(last_R1, gather_fn(state.cache, index_R))
    return logits_RV, dataclasses.replace(state, cache=cache)


def choose_next(
    state: BeamState, logits_RV: jax.Array, prompt: Prompt, alpha: jax.Array, config: DecodeConfig
) -> BeamState:
    """Extends every group by one token, given fp32 logits of the next token of each row (sentence, group, beam)."""
    batch = prompt.limit_R.shape[0]
    log_probs_BGKV = jax.nn.log_softmax(logits_RV, axis=-1).reshape(batch, config.beam_groups, -1, logits_RV.shape[-1])
    chosen_BV = jnp.zeros((batch, logits_RV.shape[-1]))
    groups = []
    for number, before in enumerate(state.groups):
        group = _extend(before, log_probs_BGKV[:, number], chosen_BV, state.generated, prompt, alpha, config)
        groups.append(group)
        if config.diversity_penalty and number + 1 < config.beam_groups:
            # A place without a hypothesis, and a sentence which was done before, chooses nothing.
            alive_BK = (group.live.scores_BK > -jnp.inf) & before.open_B[:, None]
            last_BK = jax.lax.dynamic_index_in_dim(group.live.tokens_BKT, state.generated, axis=2, keepdims=False)
            chosen_BV = chosen_BV.at[jnp.arange(batch)[:, None], last_BK].add(alive_BK)
    return dataclasses.replace(state, generated=state.generated + 1, groups=tuple(groups))


def _extend(
    group: Group,
    log_probs_BKV: jax.Array,
    chosen_BV: jax.Array,
    generated: jax.Array,
    prompt: Prompt,
    alpha: jax.Array,
    config: DecodeConfig,
) -> Group:
    """One step of one group; `chosen_BV` counts the beams of earlier groups which chose each token in this step."""
    batch, size, vocabulary = log_probs_BKV.shape
    count = min(max(2, 1 + len(config.eos_ids)) * size, size * vocabulary)
    length = generated + 1
    limit_B1 = prompt.limit_R[:, None]

    scores_BKV = log_probs_BKV
    if config.diversity_penalty:
        scores_BKV -= config.diversity_penalty * chosen_BV[:, None]
    scores_BKV = process(
        scores_BKV.reshape(batch * size, vocabulary),
        prompt.repeat(size),
        group.live.tokens_BKT.reshape(batch * size, -1),
        generated,
        config,
    ).reshape(scores_BKV.shape)
    sums_BKV = group.live.scores_BK[..., None] + scores_BKV
    sums_BC, flat_BC = largest(sums_BKV.reshape(batch, -1), count)
    parents_BC, tokens_BC = flat_BC // vocabulary, (flat_BC % vocabulary).astype(jnp.int32)

    exists_BC = sums_BC > -jnp.inf
    ends_BC = is_any_of(tokens_BC, config.eos_ids) | (length >= limit_B1)
    all_listed_B1 = ~exists_BC[:, -1:] | (count == size * vocabulary)
    nothing_pruned_B1 = all_listed_B1 & ((exists_BC & ~ends_BC).sum(axis=1, keepdims=True) <= size)
    finishes_BC = exists_BC & ends_BC & (nothing_pruned_B1 | (jnp.arange(count) < size)) & group.open_B[:, None]

    candidates = group.live.take(parents_BC)
    here_T = jnp.arange(candidates.tokens_BKT.shape[-1]) == generated
    candidates = dataclasses.replace(
        candidates,
        scores_BK=sums_BC,
        tokens_BKT=jnp.where(here_T, tokens_BC[..., None], candidates.tokens_BKT),
        lengths_BK=jnp.full_like(candidates.lengths_BK, length),
    )
    if config.return_log_probs:
        own_BC = take(log_probs_BKV.reshape(batch, -1), flat_BC)
        own_BCT = jnp.where(here_T, own_BC[..., None], candidates.log_probs_BKT)
        candidates = dataclasses.replace(candidates, log_probs_BKT=own_BCT)

    finished_BC = jnp.where(finishes_BC, sums_BC / length_penalty(length, alpha, config.length_penalty), -jnp.inf)
    finished = join([group.finished, dataclasses.replace(candidates, scores_BK=finished_BC)]).best(size)
    going_BC = jnp.where(exists_BC & ~ends_BC, sums_BC, -jnp.inf)
    live_scores_BK, live_BK = jax.lax.top_k(going_BC, size)
    live = dataclasses.replace(candidates.take(live_BK), scores_BK=live_scores_BK)
    improvable_B = _may_improve(live_scores_BK[:, 0], finished.scores_BK[:, -1], length, prompt.limit_R, alpha, config)
    open_B = group.open_B & improvable_B
    return Group(live, finished, open_B, take(parents_BC, live_BK))


def _may_improve(
    best_live_B: jax.Array,
    worst_finished_B: jax.Array,
    length: jax.Array,
    limit_B: jax.Array,
    alpha: jax.Array,
    config: DecodeConfig,
) -> jax.Array:
    """Whether a sentence goes on: it has live beams, and a free place or, by `early_stopping`, the hope of a better."""
    room_B = worst_finished_B == -jnp.inf
    kind = config.length_penalty
    hoped_B = {
        'first': jnp.full_like(best_live_B, -jnp.inf),
        'heuristic': best_live_B / length_penalty(length, alpha, kind),
        'bound': best_attainable(best_live_B, length, limit_B, alpha, kind),
    }[config.early_stopping]
    return (best_live_B > -jnp.inf) & (room_B | (hoped_B > worst_finished_B))


def _empty_group(batch: int, config: DecodeConfig, capacity: int) -> Group:
    size = config.beam_size // config.beam_groups
    log_probs = jnp.zeros((batch, size, capacity)) if config.return_log_probs else None
    nothing = Hypotheses(
        jnp.full((batch, size), -jnp.inf),
        jnp.full((batch, size, capacity), config.pad_id, jnp.int32),
        jnp.zeros((batch, size), jnp.int32),
        log_probs,
    )
    # All beams begin alike: only the first is alive, or every hypothesis would be found K times.
    live = dataclasses.replace(nothing, scores_BK=nothing.scores_BK.at[:, 0].set(0.0))
    parents_BK = jnp.broadcast_to(jnp.arange(size), (batch, size))
    return Group(live, nothing, jnp.ones(batch, bool), parents_BK)
