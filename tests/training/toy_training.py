"""A model and batches small enough that a training claim is checked in a second."""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

VOCAB = 11


class Output(NamedTuple):
    logits: Any
    aux: dict


class Toy(nn.Module):
    """Embedding, one dense layer with dropout, a norm, and logits; optionally an auxiliary loss."""

    dropout: float = 0.0
    with_aux: bool = False

    @nn.compact
    def __call__(self, tokens, deterministic=True):
        x_BTD = nn.Embed(VOCAB, 8, name='embedding')(tokens)
        x_BTD = nn.Dense(8, name='hidden')(x_BTD)
        x_BTD = nn.Dropout(self.dropout)(nn.tanh(x_BTD), deterministic=deterministic)
        logits = nn.Dense(VOCAB, name='output')(nn.LayerNorm(name='final_norm')(x_BTD))
        counted = jnp.sum((tokens > 2).astype(jnp.float32))
        aux = {'balance': (0.1 * jnp.sum(x_BTD**2 * (tokens > 2)[..., None]), counted)} if self.with_aux else {}
        return Output(logits, aux)


def batch(rows=8, length=6, seed=0):
    """Random tokens whose rows have unequal counts of real labels."""
    random = np.random.default_rng(seed)
    weights = (np.arange(length) < random.integers(1, length + 1, (rows, 1))).astype(np.float32)
    return {
        'inputs': {'tokens': random.integers(1, VOCAB, (rows, length)).astype(np.int32)},
        'labels': random.integers(0, VOCAB, (rows, length)).astype(np.int32),
        'weights': weights,
    }
