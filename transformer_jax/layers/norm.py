"""Normalisation over features."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer_jax.config import ModelConfig


class Norm(nn.Module):
    """Normalises the last axis, in fp32 whatever x is.

    'layer': (x - mean) / sqrt(variance + eps) * scale + bias (Ba et al. 2016).
    'rms': x / sqrt(mean(x^2) + eps) * scale (Zhang and Sennrich 2019); 'rms_plus_one': ... * (1 + scale) (Gemma).

    Attributes:
      axis: the logical name of the last axis (None: it is left whole).
    """

    config: ModelConfig
    axis: str | None = 'embed'

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        dtype, shape = jnp.dtype(config.param_dtype), x.shape[-1:]
        wide = x.astype(jnp.float32)
        if config.norm == 'layer':
            wide -= wide.mean(-1, keepdims=True)
        y = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + config.norm_epsilon)
        ones, zeros = (
            nn.with_logical_partitioning(init, (self.axis,)) for init in (nn.initializers.ones, nn.initializers.zeros)
        )
        if config.norm == 'rms_plus_one':
            y *= 1 + self.param('scale', zeros, shape, dtype).astype(jnp.float32)
        else:
            y *= self.param('scale', ones, shape, dtype).astype(jnp.float32)
        if config.norm == 'layer' and config.norm_bias:
            y += self.param('bias', zeros, shape, dtype).astype(jnp.float32)
        return y.astype(x.dtype)
