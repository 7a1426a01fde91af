"""Routing of a mixture of experts: which experts a token goes to, with what weights, and how tokens are laid out."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from transformer_jax.subconfigs import MixtureConfig

# Added to the sum by which weights are divided, as in the released code: all affinities of a token may be 0.
_TINY = 1e-20


class Routing(NamedTuple):
    """Where n tokens go.

    Attributes:
      experts_nk: numbers of each token's k experts.
      weights_nk: what their results are multiplied by, fp32.
      share_nE: the affinities as a distribution over all experts, for the balance loss.
    """

    experts_nk: jax.Array
    weights_nk: jax.Array
    share_nE: jax.Array


def route(logits_nE: jax.Array, bias_E: jax.Array | None, mixture: MixtureConfig) -> Routing:
    """Picks k experts for each token: the largest s + b of the best groups, weighed by s.

    s = softmax(logits) (Shazeer et al. 2017, section 2.1; Mixtral, Jiang et al. 2024, section 2.1) or
    sigmoid(logits) (DeepSeek-V3, 2024, section 2.1.2). A group is worth its largest s + b, or the sum of its two
    largest; experts of the others are out. Weights are scale s, or scale s / (sum of the chosen s). The bias b only
    picks, so it has no gradient. Ties go to the lower number.

    Args:
      logits_nE: fp32.
      bias_E: the correction bias (None: none).
    """
    softmax = mixture.affinity == 'softmax'
    affinity = jax.nn.softmax(logits_nE, axis=-1) if softmax else jax.nn.sigmoid(logits_nE)
    score = affinity if bias_E is None else affinity + bias_E.astype(jnp.float32)
    # Nothing flows back through a choice; said here, so that nobody need know the gradient rule of top_k.
    score = _of_best_groups(jax.lax.stop_gradient(score), mixture)
    experts = jax.lax.top_k(score, mixture.experts_per_token)[1]
    weights = jnp.take_along_axis(affinity, experts, axis=-1)
    if mixture.normalize:
        weights /= weights.sum(axis=-1, keepdims=True) + _TINY
    share = affinity if softmax else affinity / (affinity.sum(axis=-1, keepdims=True) + _TINY)
    return Routing(experts, mixture.scale * weights, share)


def _of_best_groups(score_nE: jax.Array, mixture: MixtureConfig) -> jax.Array:
    """Returns the scores, -inf for experts outside the `groups_per_token` best groups."""
    if mixture.groups_per_token == mixture.groups:
        return score_nE
    grouped = score_nE.reshape(score_nE.shape[0], mixture.groups, -1)
    worth = jax.lax.top_k(grouped, 1 if mixture.group_score == 'max' else 2)[0].sum(axis=-1)
    best = jax.lax.top_k(worth, mixture.groups_per_token)[1]
    kept = jax.nn.one_hot(best, mixture.groups, dtype=bool).any(axis=1)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(score_nE.shape)


def balance_loss(routing: Routing, real_n: jax.Array) -> jax.Array:
    """Returns E sum_i f_i P_i of one layer, over real tokens: 1 where they are spread evenly, 0 if there are none.

    f_i is the part of the choices which went to expert i, P_i the mean of its share (Fedus et al. 2021, section 2.2,
    eq. 4 to 6; for sigmoids DeepSeek-V3, section 2.1.2, eq. 17 to 20).
    """
    E = routing.share_nE.shape[-1]
    real = real_n.astype(jnp.float32)
    count = jnp.maximum(real.sum(), 1.0)
    frequency_E = choices_per_expert(routing, real_n) / (count * routing.experts_nk.shape[1])
    share_E = (routing.share_nE * real[:, None]).sum(axis=0) / count
    return E * (frequency_E * share_E).sum()


def choices_per_expert(routing: Routing, real_n: jax.Array) -> jax.Array:
    """Returns how many choices of real tokens went to each expert, (E,) fp32."""
    E = routing.share_nE.shape[-1]
    hits_nkE = (routing.experts_nk[..., None] == jnp.arange(E)) & real_n[:, None, None]
    return hits_nkE.sum(axis=(0, 1), dtype=jnp.float32)


def bias_step(chosen_E: jax.Array, rate: float) -> jax.Array:
    """Returns rate sign(mean c - c_i) for each expert i: up for those with few choices c, down for those with many.

    Added to the correction bias after a step, it balances the load without a loss (Wang et al. 2024, "Auxiliary-Loss-
    Free Load Balancing", algorithm 1; DeepSeek-V3, 2024, section 2.1.2, where the rate is called the bias update
    speed).

    Args:
      chosen_E: choices per expert, leading axes (such as layers) before E.
    """
    return rate * jnp.sign(chosen_E.mean(axis=-1, keepdims=True) - chosen_E)


def z_loss(logits_nE: jax.Array, real_n: jax.Array) -> jax.Array:
    """Returns the sum over real tokens of logsumexp(logits)^2 (Zoph et al. 2022, eq. 5)."""
    return jnp.where(real_n, jnp.square(jax.nn.logsumexp(logits_nE, axis=-1)), 0.0).sum()


class Groups(NamedTuple):
    """The n x k choices sorted by expert, those which are nobody's last.

    Attributes:
      order_m: number of the choice, token x k + place, at each of the m = n k sorted places.
      expert_m: the expert at each place, E for nobody.
      rank_m: how many choices of the same expert stand before it.
      sizes_E: choices of each expert.
    """

    order_m: jax.Array
    expert_m: jax.Array
    rank_m: jax.Array
    sizes_E: jax.Array


def group_by_expert(experts_nk: jax.Array, num_experts: int) -> Groups:
    """Sorts choices by expert; within an expert all first choices come before second ones, each in order of tokens.

    A choice of expert E is nobody's, as those of padding are.
    """
    n, k = experts_nk.shape
    by_place = jnp.argsort(experts_nk.T.ravel(), stable=True)
    order = by_place % n * k + by_place // n
    expert_m = experts_nk.ravel()[order]
    counts = jnp.bincount(expert_m, length=num_experts + 1)
    starts = jnp.cumsum(counts) - counts
    return Groups(order, expert_m, jnp.arange(n * k) - starts[expert_m], counts[:num_experts])


def grouped_product(
    x_mA: jax.Array, kernel_EAB: jax.Array, sizes_E: jax.Array, dtype: DTypeLike | None = None
) -> jax.Array:
    """Returns x_m W_e for rows grouped by expert e; rows past all groups give zeros.

    Sums are fp32 and rounded to `dtype` (None: that of x).

    `jax.lax.ragged_dot` leaves those rows to the backend, forward and backward, so both are masked here.
    """
    inside = (jnp.arange(x_mA.shape[0]) < sizes_E.sum())[:, None]
    x_mA = jnp.where(inside, x_mA, 0)
    kernel = kernel_EAB.astype(x_mA.dtype)
    y = jax.lax.ragged_dot(x_mA, kernel, sizes_E.astype(jnp.int32), preferred_element_type=jnp.float32)
    return jnp.where(inside, y, 0).astype(dtype or x_mA.dtype)
