"""From token ids to the first layer's input, and from the last hidden state to logits."""

from __future__ import annotations

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig
from transformer_jax.layers.dropout import Dropout
from transformer_jax.layers.linear import Linear
from transformer_jax.layers.norm import Norm
from transformer_jax.ops.copies import copy_to_parts, divides, use_copies
from transformer_jax.ops.positions import sinusoids
from transformer_jax.ops.products import ColumnMajor, einsum, take_rows
from transformer_jax.ops.quantized import QuantizedArray
from transformer_jax.sharding.activations import constrain


class Table(nn.Module):
    """E, rows of width D looked up by index; as an output matrix, logits = x E^T (Press and Wolf 2017).

    An index outside the table gives NaN, never another row.

    Attributes:
      rows: number of rows; axis: their logical name.
      padded: rows of the array, those past `rows` being unused (None: as many).
      shared: whether it is used more than once, so that its gradient is a sum.
    """

    config: ModelConfig
    rows: int
    axis: str = 'vocab'
    padded: int | None = None
    shared: bool = False

    def setup(self):
        config = self.config
        # D^-1/2, so that embeddings scaled by sqrt(D) and logits of normalised states both begin with variance 1.
        stddev = config.d_model**-0.5 if config.initializer == 'xavier' else config.initializer_stddev
        init = nn.with_logical_partitioning(nn.initializers.normal(stddev), (self.axis, 'embed'))
        shape = (self.padded or self.rows, config.d_model)
        self.embedding = self.param('embedding', init, shape, jnp.dtype(config.param_dtype))
        copied = self.shared and not isinstance(self.embedding, QuantizedArray | ColumnMajor)
        self.copies = copy_to_parts(self.embedding, (self.axis, 'embed')) if copied else None

    def __call__(self, index_BT: jax.Array) -> jax.Array:
        """Returns the rows of the given indices, BTD."""
        if self.padded is not None:
            index_BT = jnp.where(index_BT < self.rows, index_BT, self.padded)
        if isinstance(self.embedding, QuantizedArray | ColumnMajor):
            return self.embedding.take_rows(index_BT)
        return self._use(take_rows, index_BT)

    def attend(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the product with every row, BTV, in fp32."""
        return self._use(_products, x_BTD)

    def _use(self, use: Callable[[jax.Array, jax.Array], jax.Array], x_BT: jax.Array) -> jax.Array:
        if self.copies is None or not divides(self.copies, x_BT):
            return use(self.embedding, x_BT)
        return use_copies(use, self.copies, x_BT)


def _products(table_VD: jax.Array, x_BTD: jax.Array) -> jax.Array:
    return einsum('BTD,VD->BTV', x_BTD, table_VD, jnp.float32)


def word_table(config: ModelConfig, shared: bool) -> Table:
    """Returns the table of words, whose rows past the vocabulary are never looked up; `shared` as in `Table`."""
    padded = None if config.vocab_multiple == 1 else config.vocab_rows
    return Table(config, config.vocab_size, padded=padded, shared=shared)


class Embedder(nn.Module):
    """x = dropout(norm(sqrt(D) E[token] + P[position] + U[type])) (Vaswani et al. 2017, sections 3.4, 3.5, 5.4).

    Scale, positions, types and the norm (BERT, BLOOM) are each a choice of the config.
    """

    config: ModelConfig

    @nn.compact
    def __call__(
        self, embedded_BTD: jax.Array, positions_BT: jax.Array, token_types_BT: jax.Array | None, deterministic: bool
    ) -> jax.Array:
        config = self.config
        x = embedded_BTD.astype(jnp.float32)
        if config.embedding_scale == 'sqrt_d_model':
            x *= math.sqrt(config.d_model)
        if config.position.startswith('sinusoidal'):
            layout = 'halves' if config.position == 'sinusoidal_halves' else 'interleaved'
            x += sinusoids(positions_BT + config.position_offset, config.d_model, layout)
        if config.position == 'learned':
            table = Table(config, config.position_rows, 'positions', name='position')
            x += table(positions_BT + config.position_offset)
        if config.token_types:
            types = jnp.zeros_like(positions_BT) if token_types_BT is None else token_types_BT
            x += Table(config, config.token_types, 'types', name='token_type')(types)
        if config.embedding_norm:
            x = Norm(config, name='norm')(x)
        x = constrain(x.astype(config.dtype), 'batch', 'length', None)
        return Dropout(config.dropout)(x, deterministic)


class Logits(nn.Module):
    """logits = cap(scale x W + b) in fp32, W the output matrix or, where tied, the embedding's transpose.

    Columns past the vocabulary (`ModelConfig.vocab_multiple`) are -inf.
    """

    config: ModelConfig
    table: Table | None

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        config = self.config
        x_BTD = x_BTD * jnp.asarray(config.logits_scale, x_BTD.dtype)
        if self.table is None:
            logits = Linear(config, (config.d_model, config.vocab_rows), ('embed', 'vocab'), name='output')(x_BTD)
            logits = logits.astype(jnp.float32)
        else:
            logits = self.table.attend(x_BTD)
        if config.logits_bias:
            init = nn.with_logical_partitioning(nn.initializers.zeros, ('vocab',))
            bias = self.param('bias', init, (config.vocab_rows,), jnp.dtype(config.param_dtype))
            logits += bias.astype(jnp.float32)
        if config.logits_softcap is not None:
            logits = config.logits_softcap * jnp.tanh(logits / config.logits_softcap)
        if config.vocab_rows > config.vocab_size:
            logits = jnp.where(jnp.arange(config.vocab_rows) < config.vocab_size, logits, -jnp.inf)
        return constrain(logits, 'batch', 'length', 'vocab')
