"""Multi-head attention, with shared key heads, rotary positions and a cache."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig, rotary_width
from transformer_jax.layers.cache import KeysValues, LayerCache
from transformer_jax.layers.linear import Linear
from transformer_jax.layers.norm import Norm
from transformer_jax.ops import attention as ops
from transformer_jax.ops import rope
from transformer_jax.ops.masks import Mask
from transformer_jax.sharding.activations import constrain


class Attention(nn.Module):
    """MultiHead(x, c) = concat(head_1 ... head_N) W_O, head_n = softmax(scale (x W_Q^n)(c W_K^n)^T) c W_V^n.

    Self-attention has c = x. W_O is there for one head too. Vaswani et al. 2017, section 3.2.2; K < N key heads:
    Ainslie et al. 2023; norms of queries and keys: Henry et al. 2020; rotary positions: Su et al. 2021.

    Attributes:
      layer_kind: 'local' layers see a window, and may have their own rotary base.
      cross: whether keys and values come from a context.
      gain: of the initial value and output projections (DeepNorm's beta).
    """

    config: ModelConfig
    layer_kind: str = 'global'
    cross: bool = False
    gain: float = 1.0

    @nn.compact
    def __call__(
        self,
        x_BTD: jax.Array,
        context_BSD: jax.Array | None,
        mask: Mask,
        bias_BNTS: jax.Array | None,
        positions_BT: jax.Array,
        cache: LayerCache | None,
        deterministic: bool,
        return_weights: bool = False,
    ) -> tuple[jax.Array, KeysValues | None, jax.Array | None]:
        """Returns (y BTD, new cache, weights BNTS or None).

        Args:
          context_BSD: for cross-attention; None if its keys and values are in the cache already.
          mask: of the keys; a 'local' layer adds its window.
          positions_BT: of x's tokens, for rotary positions.
        """
        config = self.config
        D, N, K, H, V = config.d_model, config.num_heads, config.kv_heads, config.key_dim, config.value_dim

        def project(name, heads, axis, width, gain=1.0):
            shape, axes = (D, heads, width), ('embed', axis, 'head_dim')
            linear = Linear(config, shape, axes, use_bias=config.qkv_bias, gain=gain, name=name)
            # Every device has all keys of its rows and heads, and the queries of its own part of the positions.
            length = 'length' if name == 'query' else None
            return lambda x: constrain(linear(x), 'batch', length, axis, None)

        query = self._norm('query_norm', project('query', N, 'heads', H)(x_BTD))
        stored = cache.cross if self.cross and cache is not None else None
        if stored is None:
            source = context_BSD if self.cross else x_BTD
            key = self._norm('key_norm', project('key', K, 'kv_heads', H)(source))
            value = project('value', K, 'kv_heads', V, self.gain)(source)
            stored = _kind(cache).of(key, value)
        if self.cross:
            key = stored.key_BSKH
        else:
            query, stored, key = self._place(query, key, value, positions_BT, mask, cache)
            if self.layer_kind == 'local':
                mask = mask & Mask(window=config.window)
        drop = None
        if config.attention_dropout and not deterministic:
            drop = ops.Dropout(config.attention_dropout, self.make_rng('dropout'))
        # Beams of one sentence are more queries to the same keys: (rows, T) -> (sentences, beams x T).
        rows, T = query.shape[:2]
        sentences = key.shape[0]
        out, weights = ops.attention(
            query.reshape(sentences, -1, N, H),
            key,
            stored.value_BSKH,
            mask,
            scale=config.scale,
            bias_BNTS=bias_BNTS,
            softcap=config.attention_softcap,
            drop=drop,
            backend=config.attention_backend,
            return_weights=return_weights,
        )
        out = constrain(out.reshape(rows, T, N, V), 'batch', 'length', 'heads', None)
        if weights is not None and rows != sentences:
            weights = jnp.moveaxis(weights.reshape(sentences, N, -1, T, weights.shape[-1]), 1, 2)
            weights = weights.reshape(rows, N, T, -1)
        shape, axes = (N, V, D), ('heads', 'head_dim', 'embed')
        y = Linear(config, shape, axes, inputs=2, use_bias=config.out_bias, gain=self.gain, name='out')(out)
        return y, None if cache is None else stored, weights

    def _norm(self, name: str, x_BTNH: jax.Array) -> jax.Array:
        if self.config.qk_norm == 'none':
            return x_BTNH
        if self.config.qk_norm == 'head':
            return Norm(self.config, axis='head_dim', name=name)(x_BTNH)
        flat = x_BTNH.reshape(*x_BTNH.shape[:2], -1)
        return Norm(self.config, axis='heads', name=name)(flat).reshape(x_BTNH.shape)

    def _place(self, query, key, value, positions_BT, mask: Mask, cache: LayerCache | None):
        """Rotates queries and keys and writes the cache; returns (query, what to store, the keys to attend to)."""
        config = self.config

        def store(key):
            new = _kind(cache).of(key, value)
            return new if cache is None else cache.write(new)

        if config.position != 'rope':
            stored = store(key)
            return query, stored, stored.key_BSKH
        theta = config.rope_theta
        if self.layer_kind == 'local' and config.rope_local_theta is not None:
            theta = config.rope_local_theta
        width, scaling = rotary_width(config), config.rope_scaling
        if scaling is not None and scaling.kind == 'dynamic':
            # The base moves with the length, so keys are stored as they come and all are turned at each step.
            stored = store(key)
            key_positions = positions_BT if cache is None else mask.key_positions_BS
            table = rope.dynamic_frequencies(width, theta, scaling, key_positions.max(axis=1) + 1)
            key = rope.rotate(stored.key_BSKH, key_positions, table, 1.0, config.rope_layout)
            return rope.rotate(query, positions_BT, table, 1.0, config.rope_layout), stored, key
        table, magnitude = rope.frequencies(width, theta, scaling)
        query = rope.rotate(query, positions_BT, table, magnitude, config.rope_layout)
        stored = store(rope.rotate(key, positions_BT, table, magnitude, config.rope_layout))
        return query, stored, stored.key_BSKH


def _kind(cache: LayerCache | None) -> type[KeysValues]:
    """Returns how keys and values are kept, for themselves or in a cache."""
    return KeysValues if cache is None else type(cache.mixer)
