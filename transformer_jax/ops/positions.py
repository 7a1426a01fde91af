"""Positions which are added: sinusoids to the embedding, ALiBi and T5's buckets to the scores."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np


def sinusoids(positions_BT: jax.Array, D: int, layout: str = 'interleaved') -> jax.Array:
    """Returns the sinusoidal position encoding (B, T, D) in fp32 (Vaswani et al. 2017, section 3.5).

    PE(p, 2i) = sin(p w_i), PE(p, 2i + 1) = cos(p w_i), w_i = 10000^(-2i / D).
    Layout 'halves' has all sines before all cosines (Marian, Pegasus).
    """
    frequencies = jnp.asarray(10000.0 ** (-np.arange(0, D, 2) / D), jnp.float32)
    angles = positions_BT.astype(jnp.float32)[..., None] * frequencies
    waves = jnp.sin(angles), jnp.cos(angles)
    if layout == 'halves':
        return jnp.concatenate(waves, axis=-1)
    return jnp.stack(waves, axis=-1).reshape(*positions_BT.shape, D)


def alibi_slopes(N: int) -> np.ndarray:
    """Returns ALiBi's slope per head, 2^(-8 (n + 1) / N) for a power of two (Press et al. 2022, section 3).

    For other N the authors' rule: the slopes of the next lower power p, then every other slope of 2p.
    """
    power = 2 ** int(math.log2(N))
    slopes = 2.0 ** (-8 * np.arange(1, power + 1) / power)
    between = 2.0 ** (-8 * np.arange(1, 2 * (N - power), 2) / (2 * power))
    return np.concatenate([slopes, between]).astype(np.float32)


def alibi_bias(query_positions_BT: jax.Array, key_positions_BS: jax.Array, N: int) -> jax.Array:
    """Returns ALiBi's bias BNTS, -slope |query position - key position| (Press et al. 2022)."""
    distance_BTS = abs(query_positions_BT[:, :, None] - key_positions_BS[:, None, :]).astype(jnp.float32)
    return -jnp.asarray(alibi_slopes(N))[None, :, None, None] * distance_BTS[:, None]


def relative_bucket(distance: jax.Array, *, bidirectional: bool, buckets: int, max_distance: int) -> jax.Array:
    """Returns T5's bucket of each distance, key position - query position (Raffel et al. 2020, section 2.1).

    Half of the buckets are exact; the others grow as log(distance) to `max_distance`, beyond which all share the last.
    Bidirectional: a half of the buckets for either side; else keys ahead share bucket 0.
    """
    side = 0
    if bidirectional:
        buckets //= 2
        side = jnp.where(distance > 0, buckets, 0)
        distance = abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    exact = buckets // 2
    # Whole distances which enter each far bucket, found once in fp64: an fp32 logarithm misses borders by rounding.
    borders = np.ceil(exact * (max_distance / exact) ** (np.arange(buckets - exact) / (buckets - exact)) - 1e-9)
    far = exact - 1 + (distance[..., None] >= jnp.asarray(borders, distance.dtype)).sum(-1)
    return side + jnp.where(distance < exact, distance, far)
