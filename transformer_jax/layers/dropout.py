"""Dropout as a layer."""

from __future__ import annotations

import flax.linen as nn
import jax

from transformer_jax.ops.dropout import dropout


class Dropout(nn.Module):
    """y = x m / (1 - rate), m ~ Bernoulli(1 - rate), from the stream 'dropout'; the identity if deterministic."""

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        if deterministic or self.rate == 0:
            return x
        return dropout(x, self.rate, self.make_rng('dropout'))
