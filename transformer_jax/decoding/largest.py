"""The largest of many numbers, found in two stages."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from transformer_jax.decoding.hypotheses import take

_CHUNK = 64


def largest(x_BN: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns what `jax.lax.top_k` does: the `count` largest of each row, best first, and their indices.

    The `count` largest numbers lie in the `count` chunks whose largest numbers are largest, so only those are sorted:
    N / 64 + 64 count numbers instead of N. Among equals the one with the lower index comes first, in both stages.
    """
    batch, size = x_BN.shape
    chunks = -(-size // _CHUNK)
    if chunks <= 2 * count:
        return jax.lax.top_k(x_BN, count)
    padded = jnp.pad(x_BN, [(0, 0), (0, chunks * _CHUNK - size)], constant_values=-jnp.inf)
    x_BCM = padded.reshape(batch, chunks, _CHUNK)
    _, chosen_BQ = jax.lax.top_k(x_BCM.max(axis=2), count)
    # In their order, so that equals stand in theirs.
    chosen_BQ = jnp.sort(chosen_BQ, axis=1)
    best_BQ, place_BQ = jax.lax.top_k(take(x_BCM, chosen_BQ).reshape(batch, -1), count)
    return best_BQ, take(chosen_BQ, place_BQ // _CHUNK) * _CHUNK + place_BQ % _CHUNK
