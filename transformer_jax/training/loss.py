"""Losses as (sum, weight): summed anywhere, divided once."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp


def cross_entropy(
    logits_BTV: jax.Array,
    labels_BT: jax.Array,
    weights_BT: jax.Array,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    vocab_size: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of weighted token losses in nats, and the sum of weights ("Attention Is All You Need", 5.4).

    loss = -sum_v q_v log p_v + z_loss (log Z)^2, with q = (1 - eps) onehot(label) + eps / V, all in fp32.
    With V = 4 and eps = 0.1 the target is (.925, .025, .025, .025). A token of weight 0 adds nothing to loss or
    gradient whatever its logits and label are; a label outside [0, V) at weight > 0 is the caller's error.

    Args:
      vocab_size: V, where logits have columns past it, which are -inf (None: as many as there are logits).
    """
    weights_BT = weights_BT.astype(jnp.float32)
    vocab_size = logits_BTV.shape[-1] if vocab_size is None else vocab_size
    losses_BT = _token_losses(label_smoothing, z_loss, vocab_size, logits_BTV, labels_BT, weights_BT > 0)
    return jnp.sum(losses_BT * weights_BT), jnp.sum(weights_BT)


def accuracy(logits_BTV: jax.Array, labels_BT: jax.Array, weights_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted count of tokens whose label has the largest logit, and the sum of weights."""
    weights_BT = weights_BT.astype(jnp.float32)
    right_BT = jnp.argmax(logits_BTV, axis=-1) == labels_BT
    return jnp.sum(jnp.where(right_BT, weights_BT, 0.0)), jnp.sum(weights_BT)


def mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns total / weight, and 0 where nothing was counted."""
    return total / jnp.where(weight > 0, weight, 1.0)


# The backward pass is written out: autodiff of logsumexp and of a gather would keep a second fp32 array of BTV
# elements and scatter into a third. Here the only residuals are the logits and one number a token.


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _token_losses(label_smoothing, z_loss, vocab_size, logits_BTV, labels_BT, counted_BT):
    return _forward(label_smoothing, z_loss, vocab_size, logits_BTV, labels_BT, counted_BT)[0]


def _targets(label_smoothing: float, labels_BT: jax.Array, vocab_size: int, columns: int) -> jax.Array:
    """Returns the smoothed target distribution; always fused into its consumer, never stored."""
    column = jnp.arange(columns, dtype=labels_BT.dtype)
    hit_BTV = labels_BT[..., None] == column
    share = label_smoothing / vocab_size
    if columns > vocab_size:
        share = jnp.where(column < vocab_size, share, 0.0)
    return jnp.where(hit_BTV, 1.0 - label_smoothing + share, share)


def _forward(label_smoothing, z_loss, vocab_size, logits_BTV, labels_BT, counted_BT):
    logits32_BTV = logits_BTV.astype(jnp.float32)
    log_z_BT = jax.nn.logsumexp(logits32_BTV, axis=-1)
    target_BTV = _targets(label_smoothing, labels_BT, vocab_size, logits_BTV.shape[-1])
    # Where the target has no mass a logit of -inf is allowed; 0 * -inf would be NaN.
    expected_BT = jnp.sum(jnp.where(target_BTV > 0, target_BTV * logits32_BTV, 0.0), axis=-1)
    losses_BT = log_z_BT - expected_BT
    if z_loss:
        losses_BT += z_loss * jnp.square(log_z_BT)
    return jnp.where(counted_BT, losses_BT, 0.0), (logits_BTV, labels_BT, counted_BT, log_z_BT)


def _backward(label_smoothing, z_loss, vocab_size, residuals, cotangent_BT):
    logits_BTV, labels_BT, counted_BT, log_z_BT = residuals
    probs_BTV = jnp.exp(logits_BTV.astype(jnp.float32) - log_z_BT[..., None])
    if z_loss:
        probs_BTV *= (1.0 + 2.0 * z_loss * log_z_BT)[..., None]
    slope_BTV = (probs_BTV - _targets(label_smoothing, labels_BT, vocab_size, logits_BTV.shape[-1])) * cotangent_BT[
        ..., None
    ]
    return jnp.where(counted_BT[..., None], slope_BTV, 0.0).astype(logits_BTV.dtype), None, None


_token_losses.defvjp(_forward, _backward)
